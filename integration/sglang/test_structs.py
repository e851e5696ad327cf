"""Every body that is sent fits SGLang's own structs, and every flag its parser; asked in SGLang's own environment."""

import json
import re
import subprocess
from pathlib import Path

import pytest
from support import cpu_options

from pearl_executor.engines.sglang import bodies
from pearl_executor.engines.sglang.flags import Ports, launch_flags
from pearl_executor.engines.sglang.options import SglangOptions
from pearl_executor.ports import GenerateRequest, Sampling
from pearl_state.roles import Role

CHECK = """
import json, sys, traceback
from pydantic import TypeAdapter
from sglang.srt.entrypoints import http_server
from sglang.srt.managers import io_struct
from sglang.srt.server_args import prepare_server_args

def fields(struct):
    return set(getattr(struct, "__struct_fields__", ())) or set(struct.__dataclass_fields__)

def body(name, value):
    struct = getattr(io_struct, name)
    unknown = sorted(value.keys() - fields(struct))
    if unknown:
        return f"{name} has no {unknown}"
    if name == "GenerateReqInput":
        return http_server.generate_contract_error(value)
    TypeAdapter(struct).validate_python(value)

def flags(args):
    prepare_server_args(args)

for line in sys.stdin:
    kind, *rest = json.loads(line)
    try:
        print("#", json.dumps({"body": body, "flags": flags}[kind](*rest)), flush=True)
    except BaseException as error:
        print("#", json.dumps(f"{type(error).__name__}: {error}"), flush=True)
"""

REQUEST = GenerateRequest(rid="t00000001.0001.001", prompt=(1, 2, 3), max_new_tokens=4, affinity="t00000001")
BODIES = [
    ("GenerateReqInput", bodies.generate(REQUEST)),
    ("GenerateReqInput", bodies.generate(REQUEST, ("127.0.0.1", 8998, 2**61 + 1))),
    (
        "GenerateReqInput",
        bodies.generate(
            GenerateRequest(
                rid="r", prompt=[1], max_new_tokens=1, sampling=Sampling(stop_token_ids=(3, 4), seed=7, top_p=0.5)
            )
        ),
    ),
    ("AbortReq", bodies.abort("t00000001.0001.001")),
    ("AbortReq", bodies.abort_all()),
    *(("PauseGenerationReqInput", bodies.pause(mode)) for mode in ("abort", "retract", "in_place")),
    ("ContinueGenerationReqInput", {}),
    ("ReleaseMemoryOccupationReqInput", bodies.tags("kv_cache", "weights", "cuda_graph")),
    ("ResumeMemoryOccupationReqInput", bodies.tags("weights")),
    ("PdRoleSwitchReqInput", bodies.role_switch(Role.PREFILL, prepare_only=True)),
    ("PdRoleSwitchReqInput", bodies.role_switch(Role.DECODE, 1.5)),
    ("UpdateWeightFromDiskReqInput", bodies.weights_from_disk("/folder", 7)),
    ("BeginWeightUpdateReqInput", {}),
    ("EndWeightUpdateReqInput", {}),
    ("UpdateWeightsFromTensorReqInput", bodies.weights_from_tensor(["gASVAAAAAAAAAF2ULg=="], 7)),
    ("UpdateWeightsFromTensorReqInput", bodies.weights_from_tensor(["gASVAAAAAAAAAF2ULg=="], None)),
    ("UpdateWeightsFromIPCReqInput", bodies.weights_from_ipc({"GPU-1": "ipc:///tmp/socket"}, 7)),
    ("InitWeightsUpdateGroupReqInput", bodies.weights_group("127.0.0.1", 29500, 1, 2, "g", "gloo")),
    ("UpdateWeightsFromDistributedReqInput", bodies.weights_from_group(["w"], ["float32"], [[2, 3]], "g", 7)),
    ("DestroyWeightsUpdateGroupReqInput", bodies.leave_group("g")),
    ("CheckWeightsReqInput", bodies.checksum()),
]


def flags(options, **changes):
    chosen = {"disaggregated": False, "weight_version": -1, "admin_key": "k", "gated": False, **changes}
    return launch_flags(options, Ports(http=31001, bootstrap=31002, gate=31003), **chosen)


@pytest.fixture(scope="module")
def sglang(real_interpreter):
    """Asks a process of SGLang's environment, one question a line."""
    child = subprocess.Popen(
        [*real_interpreter, "-c", CHECK], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        text=True, process_group=0,
    )  # fmt: skip

    def ask(*question):
        child.stdin.write(json.dumps(question) + "\n")
        child.stdin.flush()
        while not (line := child.stdout.readline()).startswith("#"):
            assert line, "the process ended"
        return json.loads(line[1:])

    yield ask
    child.stdin.close()
    child.stdout.close()
    child.wait(20)


@pytest.mark.parametrize(("struct", "body"), BODIES)
def test_a_body_fits_the_struct_of_its_endpoint(sglang, struct, body):
    assert sglang("body", struct, json.loads(json.dumps(body))) is None


def test_no_body_is_left_out():
    """Each function that makes one is asked above."""
    own = {name for name, value in vars(bodies).items() if getattr(value, "__module__", "") == bodies.__name__}
    assert own
    assert own <= set(re.findall(r"bodies\.(\w+)\(", Path(__file__).read_text()))


def test_the_check_itself_finds_what_does_not_fit(sglang):
    assert "no ['tag']" in sglang("body", "ReleaseMemoryOccupationReqInput", {"tag": []})
    assert "ValidationError" in sglang("body", "UpdateWeightFromDiskReqInput", {"model_path": "f", "weight_version": 7})
    assert sglang("body", "GenerateReqInput", {"input_ids": [1], "sampling_params": {"max_tokens": 3}}) is not None
    assert "SystemExit" in sglang("flags", ["--model-path", "m", "--no-such-flag"])


@pytest.mark.parametrize("disaggregated", [False, True])
def test_every_flag_is_known_to_the_parser(sglang, model, disaggregated):
    cpu = cpu_options(("python",), model[0])
    for options in (
        cpu,
        SglangOptions(
            interpreter=("python",),
            model_dir=Path(model[0]),
            host="10.0.0.1",
            dtype="bfloat16",
            kv_tokens=1000,
            memory_fraction=0.8,
            prefill_chunk_tokens=4096,
            load_format="dummy",
            gpus_per_worker=2,
        ),
    ):
        assert sglang("flags", flags(options, disaggregated=disaggregated)) is None
        assert sglang("flags", flags(options, disaggregated=disaggregated, gated=True)) is None
