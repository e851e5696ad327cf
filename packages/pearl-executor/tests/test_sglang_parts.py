"""The parts of the SGLang engine that do no I/O: answers, counters, flags, checksums, options."""

import json
import struct
from array import array
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pearl_executor.engines.sglang import bodies
from pearl_executor.engines.sglang.answers import Answer, AnswerError
from pearl_executor.engines.sglang.checksums import compare, expected_checksums
from pearl_executor.engines.sglang.flags import Ports, launch_environment, launch_flags
from pearl_executor.engines.sglang.options import SglangOptions
from pearl_executor.engines.sglang.samples import Meter, decode_samples
from pearl_executor.engines.sglang.served import OPEN_PORTS
from pearl_executor.engines.sglang.sizes import ModelSize
from pearl_executor.ports import Finish, GenerateRequest, Sampling, WorkerError
from pearl_state.roles import Role
from pearl_state.trajectory import WeightSpan


def event(tokens, total, version="3", reason=None, **meta):
    entries = [[-0.1 * token, token, None] for token in tokens]
    known = {"completion_tokens": total, "weight_version": version, "output_token_logprobs": entries}
    return {"output_ids": list(tokens), "meta_info": {**known, "finish_reason": reason, **meta}}


def test_events_add_up_to_an_answer_with_exact_version_spans():
    answer = Answer()
    assert answer.add(event([5], 1)).tokens == (5,)
    chunk = answer.add(event([6, 7], 3, version="4"))
    assert (chunk.offset, chunk.version, chunk.logprobs) == (1, 4, (-0.6000000000000001, -0.7000000000000001))
    spans = [{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 4}]
    answer.add(event([8], 4, "4", {"type": "stop", "matched": 8}, weight_versions=spans, cached_tokens=9))
    assert answer.finish is Finish.STOP
    assert answer.spans == [WeightSpan(3, 2), WeightSpan(4, 2)]
    assert answer.cached_tokens == 9


def test_an_event_that_was_labelled_with_newer_weights_than_drew_it_is_corrected_by_the_last():
    """The HTTP side names its newest version; a request that ended just before an update is handed on after it."""
    answer = Answer()
    versions = [
        answer.add(event([5], 1, "1")).version,
        answer.add(event([6], 2, "2")).version,
        answer.add(
            event(
                [7], 3, "1", {"type": "length", "length": 3}, weight_versions=[{"version": "1", "start": 0, "end": 3}]
            )
        ).version,
    ]
    assert versions == sorted(versions)
    assert answer.spans == [WeightSpan(1, 3)]
    backwards = [{"version": "2", "start": 0, "end": 1}, {"version": "1", "start": 1, "end": 2}]
    answer = Answer()
    answer.add(event([5], 1, "1"))
    with pytest.raises(AnswerError, match="goes back"):
        answer.add(event([6], 2, "1", {"type": "length", "length": 2}, weight_versions=backwards))


def test_an_abort_of_the_servers_own_doing_is_a_failure_and_a_plain_one_is_not():
    plain, failed = Answer(), Answer()
    plain.add(event([], 0, reason={"type": "abort", "message": "Aborted", "status_code": None}))
    assert (plain.finish, plain.failure) == (Finish.INTERRUPTED, "")
    failed.add(event([], 0, reason={"type": "abort", "message": "KVTransferError", "status_code": 500}))
    assert failed.failure == "500: KVTransferError"
    refused = Answer()
    refused.add({"error": {"message": "Duplicate request ID detected: r", "code": 400}})
    assert refused.failure == "Duplicate request ID detected: r"


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (event([7], 3), "2 tokens were never sent"),
        ({"output_ids": [7], "meta_info": {"completion_tokens": 1, "weight_version": "3"}}, "1 tokens with 0 logprobs"),
        ({"output_ids": [7]}, "cannot be understood"),
        (event([7], 1, version="default"), "cannot be understood"),
        (
            event([7], 1, reason={"type": "length"}, weight_versions=[{"version": "3", "start": 1, "end": 2}]),
            "leave a gap",
        ),
    ],
)
def test_an_answer_that_contradicts_itself_is_refused(bad, words):
    with pytest.raises(AnswerError, match=words):
        Answer().add(bad)


@given(
    tokens=st.lists(st.integers(0, 9), min_size=1, max_size=20),
    cuts=st.lists(st.integers(1, 19), max_size=5),
    repeats=st.sets(st.integers(0, 5)),
)
@settings(max_examples=40, deadline=None)
def test_tokens_are_taken_once_however_events_are_cut_and_repeated(tokens, cuts, repeats):
    answer = Answer()
    edges = sorted({0, len(tokens), *(cut for cut in cuts if cut < len(tokens))})
    for number, (start, end) in enumerate(pairwise(edges)):
        answer.add(event(tokens[start:end], end))
        if number in repeats:
            assert answer.add(event(tokens[end - 1 : end], end)) is None
    assert answer.tokens == tokens


def test_a_least_squares_line_is_conveyed_by_two_samples():
    """t = 5 ms + 1 ms·B over batches 1, 2, 4 and 8."""
    sizes = [1, 2, 4, 8, 8, 4, 2, 1]
    times = [5000 + 1000 * size for size in sizes]
    delta = [
        len(sizes), sum(sizes), sum(times), sum(size**2 for size in sizes),
        sum(size * time for size, time in zip(sizes, times, strict=True)),
    ]  # fmt: skip
    low, high = decode_samples(delta)
    assert low.sequences < high.sequences
    for sample in (low, high):
        assert sample.duration_s / sample.iterations == pytest.approx(0.005 + 0.001 * sample.sequences)


def test_iterations_that_were_all_alike_are_one_sample():
    (sample,) = decode_samples([10, 40, 90_000, 160, 360_000])
    assert (sample.sequences, sample.iterations) == (4, 10)
    assert sample.duration_s == pytest.approx(0.09)


def load(**changes):
    return {
        "num_running_reqs": 2, "num_waiting_reqs": 1, "num_used_tokens": 30, "max_total_num_tokens": 100,
        "total_prefill_uncached_tokens": 0, "total_prefill_busy_us": 0, "decode_moments": None,
        "disaggregation": {"mode": "decode", "decode_transfer_queue_reqs": 3, "decode_prealloc_queue_reqs": 1},
        **changes,
    }  # fmt: skip


def test_a_meter_reports_what_happened_between_two_looks():
    meter = Meter(kv_bytes_per_token=512)
    meter.look(load())
    meter.look(
        load(total_prefill_uncached_tokens=50, total_prefill_busy_us=2_000, decode_moments=[4, 8, 4e4, 16, 8e4, 8])
    )
    meter.look_at_transfers('sglang:kv_transfer_latency_ms_sum{engine_type="dynamic"} 0\n')
    meter.look_at_transfers(
        "\n".join(
            (
                'sglang:kv_transfer_latency_ms_sum{engine_type="dynamic"} 30',
                'sglang:kv_transfer_latency_ms_count{engine_type="dynamic"} 2',
                'sglang:kv_transfer_latency_ms_bucket{le="1"} 2',
                'sglang:kv_transfer_total_mb_sum{engine_type="dynamic"} 1',
                "sglang:num_running_reqs 3",
            )
        )
    )
    found = meter.take(Role.DECODE)
    assert [(s.tokens, s.duration_s) for s in found.prefill] == [(50, 0.002)]
    assert [(s.sequences, s.iterations, s.duration_s) for s in found.decode] == [(2, 4, 0.04)]
    assert [(s.tokens, s.bytes, s.duration_s) for s in found.transfer] == [(1024, 2**19, 0.015)]
    assert (found.running, found.waiting, found.kv_used_tokens, found.kv_capacity_tokens) == (2, 5, 30, 100)
    assert meter.take(Role.DECODE).decode == ()


OPTIONS = SglangOptions(interpreter=("python",), model_dir="/model", device="cuda", gpus_per_worker=2)


def test_every_disaggregated_server_starts_as_decode_and_can_flip():
    ports = Ports(http=1, bootstrap=2, gate=3)
    flags = launch_flags(OPTIONS, ports, disaggregated=True, weight_version=4, admin_key="k", gated=True)
    assert flags[flags.index("--disaggregation-mode") + 1] == "decode"
    assert {"--enable-pd-role-switch", "--disaggregation-decode-enable-radix-cache", "--enable-memory-saver"} <= {
        *flags
    }
    assert flags[flags.index("--disaggregation-bootstrap-port") + 1] == "2"
    assert flags[flags.index("--gated-launch-port") + 1] == "3"
    alone = launch_flags(OPTIONS, ports, disaggregated=False, weight_version=4, admin_key="k", gated=False)
    assert not [flag for flag in alone if "disaggregation" in flag or "gated" in flag]


def test_a_servers_environment_names_its_gpus_and_keeps_probes_from_generating():
    environment = launch_environment(OPTIONS, "4,5")
    assert environment["CUDA_VISIBLE_DEVICES"] == "4,5"
    assert environment["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] == "0"


def test_only_where_a_person_says_so_may_a_server_listen_elsewhere():
    assert OPEN_PORTS not in launch_environment(OPTIONS, "4,5")
    assert launch_environment(replace(OPTIONS, open_ports=True), "4,5")[OPEN_PORTS] == "1"


def test_a_backend_that_cannot_change_roles_is_refused():
    """NIXL neither deregisters on release nor switches roles (NIXL#795, sglang#10365)."""
    with pytest.raises(ValueError, match=r'transfer_backend = "nixl": cannot change roles.*use "mooncake"'):
        SglangOptions(interpreter=("python",), model_dir="/model", transfer_backend="nixl")
    with pytest.raises(ValueError, match="interpreter is empty"):
        SglangOptions(interpreter=(), model_dir="/model")


def test_a_server_is_held_to_an_address_not_to_a_name():
    """What listens is known to the kernel by addresses: nothing could be compared with a name."""
    assert replace(OPTIONS, host="::1").host == "::1"
    for host in ("localhost", "node-7", "0::1", ""):
        with pytest.raises(ValueError, match="is no IP address"):
            replace(OPTIONS, host=host)


def test_without_stop_tokens_the_models_end_token_is_a_token_like_any_other():
    asked = GenerateRequest(rid="r", prompt=(1, 2), max_new_tokens=3)
    assert bodies.generate(asked)["sampling_params"]["ignore_eos"] is True
    stopping = GenerateRequest(rid="r", prompt=(1, 2), max_new_tokens=3, sampling=Sampling(stop_token_ids=(7,)))
    parameters = bodies.generate(stopping, ("h", 8998, 5))["sampling_params"]
    assert "ignore_eos" not in parameters
    assert parameters["stop_token_ids"] == [7]


def write(folder, tensors, dtype="F32"):
    header, data = {}, b""
    for name, (shape, values) in tensors.items():
        raw = array("f", values).tobytes()
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)


QKV = {f"model.layers.0.self_attn.{part}_proj.weight": ([1, 2], [ord(part), 1.0]) for part in "vqk"}


def test_checksums_are_of_fused_and_padded_parameters(tmp_path):
    write(tmp_path, {**QKV, "model.embed_tokens.weight": ([3, 1], [1.0, 2.0, 3.0]), "model.norm.weight": ([1], [1.0])})
    found = expected_checksums(tmp_path, "F32")
    assert set(found) == {"model.layers.0.self_attn.qkv_proj.weight", "model.embed_tokens.weight", "model.norm.weight"}
    other = tmp_path / "other"
    other.mkdir()
    write(
        other,
        {"fused": ([3, 2], [113.0, 1.0, 107.0, 1.0, 118.0, 1.0]), "padded": ([64, 1], [1.0, 2.0, 3.0, *[0.0] * 61])},
    )
    alike = expected_checksums(other, "F32")
    assert found["model.layers.0.self_attn.qkv_proj.weight"] == alike["fused"]
    assert found["model.embed_tokens.weight"] == alike["padded"]
    assert expected_checksums(tmp_path, "BF16") == {}


def test_a_file_that_is_cut_off_is_refused(tmp_path):
    write(tmp_path, QKV)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(WorkerError, match="ends after the file"):
        expected_checksums(tmp_path, "F32")
    with pytest.raises(WorkerError, match="no weights in"):
        expected_checksums(tmp_path / "none", "F32")


def test_weights_are_compared_by_parameter():
    assert compare({"a": "1", "b": "2"}, {"a": "1", "lm_head.weight": "9"}) is None
    assert compare({"a": "1", "b": "2"}, {"a": "1", "b": "3"}) == "1 of 2 parameters differ, b first"
    assert compare({"a": "1"}, {"a": "1", "c": "3"}) == "1 parameters of the snapshot are not in the server, c first"


def test_sizes_come_from_the_models_own_configuration(tmp_path):
    config = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    (tmp_path / "config.json").write_text(json.dumps(config))
    write(tmp_path, {"w": ([2], [1.0, 2.0])})
    size = ModelSize.of(tmp_path, "float32")
    assert size.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4
    assert size.weight_bytes == 8
    assert ModelSize.of(tmp_path, "bfloat16").weight_bytes == 4
    assert ModelSize.of(tmp_path, "auto").weight_bytes == 8
    with pytest.raises(ValueError, match="no model configuration"):
        ModelSize.of(tmp_path / "none", "float32")
