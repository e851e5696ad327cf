"""Settings of how people reach a run while it goes on."""

from pydantic import Field

from pearl_rl.settings.job import Section


class ControlSettings(Section):
    """`[control]`: a small HTTP server on this machine's loopback, through which people pin, fence and freeze."""

    http: bool = Field(description="whether the run listens; where and with which token, control.json says")
    http_port: int = Field(ge=0, le=65_535, description="port on 127.0.0.1; 0 takes a free one")
