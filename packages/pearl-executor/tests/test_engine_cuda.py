"""The same engine on a CUDA device: tokens, hand-over and memory."""

import random

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from pearl_executor.engines.torch.blob import KvBlob  # noqa: E402
from pearl_executor.ports import GenerateRequest, Sampling  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def requests(count, temperature):
    draw = random.Random(0)
    for rid in range(count):
        prompt = [draw.randrange(1, 128) for _ in range(draw.randrange(1, 60))]
        sampling = Sampling(temperature=temperature, seed=rid)
        yield GenerateRequest(rid=str(rid), prompt=prompt, max_new_tokens=16, sampling=sampling)


@pytest.mark.parametrize("name", ["qwen3", "gpt2", "mistral-window", "gptoss-sinks", "deepseek-mla"])
def test_tokens_on_cuda_equal_those_on_the_cpu(name, make_engine, drive):
    device, host = make_engine(name=name, device="cuda"), make_engine(name=name)
    for request in requests(9, temperature=0.0):
        device.add(request)
        host.add(request)
    found, expected = drive(device)[0], drive(host)[0]
    assert {rid: result.tokens for rid, result in found.items()} == {rid: r.tokens for rid, r in expected.items()}


def test_a_hand_over_between_cuda_engines_keeps_the_tokens(make_engine, drive):
    prefill, decode = make_engine("prefill", device="cuda"), make_engine("decode", device="cuda")
    together = make_engine(device="cuda")
    for request in requests(5, temperature=1.0):
        prefill.add(request)
        blob = drive(prefill)[1][request.rid]
        decode.add(request, kv=KvBlob.from_bytes(blob.to_bytes()))
        apart = drive(decode, streamed={request.rid: list(blob.tokens[-1:])})[0][request.rid]
        together.add(request)
        assert apart.tokens == drive(together)[0][request.rid].tokens


def test_release_gives_device_memory_back(make_engine, model_dir):
    engine = make_engine(kv_tokens=1_000_000, device="cuda")
    size = 1_000_001 * 2 * 2 * 2 * 8 * 4
    report = engine.release()
    assert report.before_bytes - report.after_bytes > 0.9 * size
    assert engine.resume().after_bytes > report.after_bytes + 0.9 * size
    assert engine.load_weights(model_dir(), 0) == 0
