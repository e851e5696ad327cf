"""Settings of a run: strict TOML over the bundled default job, every value with its origin."""

from pearl_rl.errors import SettingsError
from pearl_rl.settings.load import ResolvedSettings, load_settings
from pearl_rl.settings.root import Settings
from pearl_rl.settings.write import json_schema, to_json, to_toml

__all__ = ["ResolvedSettings", "Settings", "SettingsError", "json_schema", "load_settings", "to_json", "to_toml"]
