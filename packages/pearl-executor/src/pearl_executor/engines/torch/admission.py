"""What an engine refuses, each with one line: what, which value, which rule, what to do."""

from pearl_executor.engines.torch.blob import KvBlob
from pearl_executor.engines.torch.contract import EngineError, EngineLimits, RequestRefusedError
from pearl_executor.engines.torch.model import Model
from pearl_executor.engines.torch.pool import KvLayout
from pearl_executor.ports import GenerateRequest, TransferError
from pearl_state.roles import ROLLOUT_ROLES, Role


def check_role(role: Role) -> None:
    """Raise `EngineError` for a role that is none of rollout's."""
    if role not in ROLLOUT_ROLES:
        raise EngineError(f"role {role.value}: an engine is {', '.join(r.value for r in ROLLOUT_ROLES)}")


def check_limits(limits: EngineLimits, model: Model) -> None:
    """Raise `EngineError` for contexts beyond the model's positions."""
    longest = model.max_position
    if longest is not None and limits.max_context_tokens > longest:
        raise EngineError(
            f"max_context_tokens = {limits.max_context_tokens}: the model knows {longest} positions; lower it"
        )


def check_request(
    request: GenerateRequest, role: Role, limits: EngineLimits, model: Model, *, handed_over: bool
) -> None:
    """Raise `RequestRefusedError` for a request that this engine could never serve."""
    prompt, new = len(request.prompt), request.max_new_tokens
    sampling = request.sampling
    longest = min(limits.kv_tokens, limits.max_context_tokens)
    rules = (
        (prompt < 1, "its prompt is empty; give at least one token"),
        (new < 1, f"max_new_tokens = {new}: must be at least 1"),
        (
            prompt + new > longest,
            f"{prompt} prompt + {new} new tokens exceed {longest} (kv_tokens = {limits.kv_tokens},"
            f" max_context_tokens = {limits.max_context_tokens}); shorten it",
        ),
        (sampling.temperature < 0, f"temperature = {sampling.temperature}: must be at least 0"),
        (not 0 < sampling.top_p <= 1, f"top_p = {sampling.top_p}: must be in (0, 1]"),
        (handed_over and role is Role.PREFILL, "a prefill worker takes no KV; send it to a decode worker"),
        (not handed_over and role is Role.DECODE, "a decode worker computes no prompt; prefill it elsewhere"),
    )
    for broken, text in rules:
        if broken:
            raise RequestRefusedError(f"request {request.rid}: {text}")
    worst = max(request.prompt)
    if min(request.prompt) < 0 or worst >= model.vocabulary:
        raise RequestRefusedError(f"request {request.rid}: its token ids must be in 0 … {model.vocabulary - 1}")


def check_blob(kv: KvBlob, request: GenerateRequest, layout: KvLayout, version: int) -> None:
    """Raise `TransferError` for a hand-over that is not this request's, or does not fit this engine."""
    found = tuple((k.shape[1:], v.shape[1:]) for k, v in zip(kv.keys, kv.values, strict=True))
    needed = tuple(((s.heads, s.key_dim), (s.heads, s.value_dim)) for s in layout.layers)
    generated = len(kv.logprobs)
    rules = (
        (kv.dtype != layout.dtype_name, f"is {kv.dtype}, the engine holds {layout.dtype_name}"),
        (found != needed, f"has layers {found[:1]} x {len(found)}, the engine {needed[:1]} x {len(needed)}"),
        (generated < 1, "has no generated token to continue from"),
        (kv.tokens[: len(kv.tokens) - generated] != tuple(request.prompt), "belongs to another prompt"),
        (generated >= request.max_new_tokens, f"has all of its {generated} tokens already; it is finished"),
        (kv.version > version, f"is of weight version {kv.version}, newer than the engine's {version}"),
    )
    for broken, text in rules:
        if broken:
            raise TransferError(f"KV of request {request.rid} {text}")
