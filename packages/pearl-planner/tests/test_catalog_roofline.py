"""Names of the catalog, and rooflines against public kernel measurements."""

import pytest

from pearl_planner.catalog import PROFILES, CatalogError, find_gpu, find_model, find_profile, gpus, models
from pearl_planner.roofline import (
    Efficiency,
    decode_iteration_s,
    kv_bytes_per_token,
    planning_inputs,
    platform_profile,
)
from pearl_state.profile import PlatformProfile, WorkloadProfile

QWEN_8B, QWEN_30B = find_model("Qwen3-8B"), find_model("Qwen3-30B-A3B")
H100 = find_gpu("h100")


@pytest.mark.parametrize("name", ["qwen3-8b", "QWEN3-8B", "Qwen/Qwen3-8B", " Qwen3-8B "])
def test_models_are_found_in_any_case(name):
    assert find_model(name).name == "Qwen3-8B"


@pytest.mark.parametrize(("alias", "name"), [("h800", "H800-SXM-80GB"), ("H100", "H100-SXM-80GB"), ("l4", "L4")])
def test_gpus_are_found_by_alias(alias, name):
    assert find_gpu(alias).name == name


@pytest.mark.parametrize(
    ("find", "name", "message"),
    [
        (find_model, "qwen3-9b", "no model 'qwen3-9b' in the catalog: did you mean 'Qwen3-8B'?"),
        (find_model, "?", "no model '?' in the catalog: known are DeepSeek-V3.2, Qwen2.5-14B"),
        (find_gpu, "h8oo", "no GPU 'h8oo' in the catalog: did you mean 'h800'?"),
        (find_profile, "swe-64k", "no profile 'swe-64k' in the catalog: did you mean 'swe-32k'?"),
        (find_profile, "../gpus", "no profile '../gpus' in the catalog: known are swe-32k"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(find, name, message):
    with pytest.raises(CatalogError) as error:
        find(name)
    assert str(error.value).startswith(message)


def test_shapes_add_up():
    """Derived quantities follow from the shapes."""
    for model in models().values():
        assert model.source
        if model.shared_latent_kv:
            continue
        kv = 2 * model.layers * model.kv_heads * model.head_dim * 2
        assert model.kv_bytes_per_token == kv
        assert model.attention_flops_per_context_token == 4 * model.layers * model.heads * model.head_dim
        assert model.flops_per_token == pytest.approx(2 * (model.params_active - model.vocab * model.hidden), rel=2e-3)
        assert model.expert_bytes < model.weight_bytes


@pytest.mark.parametrize("name", PROFILES)
def test_every_value_of_a_bundled_profile_names_its_origin(name):
    profile = find_profile(name)
    for values, kind in ((profile.workload, WorkloadProfile), (profile.platform, PlatformProfile)):
        made = kind(**values)
        assert made.origin.keys() == values.keys() - {"origin"}
        assert all(name in origin and len(origin) > 20 for origin in made.origin.values())
    assert find_model(profile.model).name == profile.model
    assert find_gpu(profile.gpu).name == profile.gpu


# Sums of public kernel tables for H100 at TP2, 16K context (decode step over 1 to 64 sequences; prefill per token).
@pytest.mark.parametrize(
    ("model", "fixed_s", "per_sequence_s", "prefill_s"),
    [(QWEN_8B, 4.2e-3, 0.383e-3, (16e-6, 22e-6)), (QWEN_30B, 6.5e-3, 0.324e-3, (21e-6, 30e-6))],
    ids=lambda value: getattr(value, "name", None),
)
def test_the_roofline_is_near_the_sums_of_kernel_tables(model, fixed_s, per_sequence_s, prefill_s):
    profile = platform_profile(model, H100, 2, context_tokens=16_384)
    assert profile.decode_fixed_s == pytest.approx(fixed_s, rel=0.1)
    assert profile.decode_per_sequence_s == pytest.approx(per_sequence_s, rel=0.2)
    assert prefill_s[0] <= profile.prefill_per_token_s <= prefill_s[1]


@pytest.mark.parametrize(("sequences", "measured_s"), [(1, 3.5e-3), (8, 8.5e-3), (128, 46e-3)])
def test_a_mixture_of_experts_reads_more_experts_with_more_sequences(sequences, measured_s):
    step = decode_iteration_s(QWEN_30B, H100, 2, sequences=sequences, context_tokens=16_384)
    assert step == pytest.approx(measured_s, rel=0.1)


@pytest.mark.parametrize(("sequences", "kernels_s"), [(1, 3.6e-3), (16, 5.4e-3), (64, 9.9e-3)])
def test_decode_of_a_dense_model_is_near_its_kernel_sums(sequences, kernels_s):
    step = decode_iteration_s(QWEN_8B, H100, 2, sequences=sequences, context_tokens=4096)
    assert kernels_s <= step <= kernels_s * 1.25


def test_what_is_bigger_or_slower_takes_longer():
    def step(model=QWEN_8B, gpu=H100, tp=2, sequences=16, context=8192, **options):
        return decode_iteration_s(model, gpu, tp, sequences=sequences, context_tokens=context, **options)

    base = step()
    assert step(tp=4) < base < step(tp=1)
    assert step(gpu=find_gpu("h200")) < base < step(gpu=find_gpu("l4"))
    assert step(sequences=8) < base < step(context=16_384)
    assert step(efficiency=Efficiency(kv_read=0.5)) > base
    assert step(model=find_model("qwen2.5-14b")) > base


def test_heads_must_divide_over_the_gpus_of_a_worker():
    with pytest.raises(CatalogError) as error:
        platform_profile(QWEN_8B, H100, 3, context_tokens=8192)
    assert str(error.value) == (
        "tp = 3 does not divide the 32 heads and 8 KV heads of Qwen3-8B; use one of 1, 2, 4, 8, 16, 32"
    )
    with pytest.raises(CatalogError, match="must be at least 1"):
        platform_profile(QWEN_8B, H100, 0, context_tokens=8192)


def test_kv_heads_are_held_twice_above_their_number():
    assert kv_bytes_per_token(QWEN_30B, 4) == 98_304
    assert kv_bytes_per_token(QWEN_30B, 8) == 2 * 98_304
    assert kv_bytes_per_token(find_model("deepseek-v3.2"), 8) == 8 * 70_272


def test_weights_must_fit():
    with pytest.raises(
        CatalogError, match=r"470 GB of weights\) does not fit on 4 x H100-SXM-80GB; it needs at least 7"
    ):
        platform_profile(find_model("qwen3-235b-a22b"), H100, 4, context_tokens=8192)


@pytest.mark.parametrize("model", models())
@pytest.mark.parametrize("gpu", gpus())
def test_every_pairing_that_fits_gives_a_profile(model, gpu):
    spec = find_model(model)
    for tp in (1, 2, 4, 8):
        try:
            profile = platform_profile(spec, find_gpu(gpu), tp, context_tokens=8192)
        except CatalogError:
            assert spec.heads % tp or spec.weight_bytes > 0.7 * tp * find_gpu(gpu).hbm_bytes
            continue
        assert 1e-4 < profile.decode_fixed_s < 1.0
        assert 1e-7 < profile.prefill_per_token_s < 0.01
        assert profile.kv_capacity_bytes == pytest.approx(profile.prefix_capacity_tokens * profile.kv_bytes_per_token)
        assert "roofline" in profile.origin["decode_fixed_s"]


def test_the_bundled_platform_is_used_for_its_own_kind_of_worker_only():
    profile = find_profile("swe-32k")
    own = planning_inputs(profile, QWEN_8B, find_gpu("h800"), 2)
    assert own.platform.decode_fixed_s == 0.0065
    assert own.notes == ("workload and platform: bundled profile swe-32k",)
    other = planning_inputs(profile, QWEN_30B, find_gpu("h800"), 2)
    assert other.workload == own.workload
    assert other.platform.kv_bytes_per_token == 98_304
    assert "analytic roofline of Qwen3-30B-A3B on 2 x H800-SXM-80GB, not measured" in other.notes[1]
    with pytest.raises(CatalogError, match="does not divide"):
        planning_inputs(profile, QWEN_8B, find_gpu("h800"), 3)
