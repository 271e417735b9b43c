"""What the doctor says of every kind of machine, from facts as they would be found there."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace

import jax
import pytest

from jaxprims import doctor
from jaxprims.core import ffi
from jaxprims.doctor import Facts, Gpu, find_problems, render

H200 = Gpu("NVIDIA H200", "9.0", "580.65.06")


def well(**changes) -> Facts:
    facts = Facts(
        versions={"python": "3.12.1", "jax": "0.10.0"},
        gpus=[H200],
        device_file=True,
        plugins=["jax-cuda13-plugin 0.10.0"],
        jax_gpus=["NVIDIA H200 (cuda:0)"],
        library_path="/x/jaxprims/_cuda.so",
        library_loaded=True,
        library_api="0.3",
        runtime_api="0.4",
        build_info="archs=sm_80,compute_80,sm_90a; cuda=13.0",
    )
    for name, value in changes.items():
        setattr(facts, name, value)
    return facts


def test_a_gpu_with_its_kernels_is_well():
    assert find_problems(well()) == []
    text = render(well(), [])
    assert "All well" in text and "NVIDIA H200, compute capability 9.0" in text and "runtime 0.4, library 0.3" in text


def test_a_machine_without_a_gpu_is_well():
    facts = Facts(library_reason="built without CUDA kernels", library_remedy="make build")
    assert find_problems(facts) == []
    text = render(facts, [])
    assert "No NVIDIA GPU here" in text and text.endswith("To have the kernels too: make build")


def test_a_named_library_is_mended_by_its_name(monkeypatch, tmp_path):
    monkeypatch.setenv("JAXPRIMS_LIBRARY", str(tmp_path / "nope.so"))
    ffi._load.cache_clear()
    try:
        facts = doctor.examine()
    finally:
        monkeypatch.undo()
        ffi._load.cache_clear()
    assert facts.library_named and "does not load" in (facts.library_reason or "")
    assert "unset JAXPRIMS_LIBRARY" in render(facts, find_problems(facts)) and "pip install" not in facts.library_remedy
    for changes in (dict(device_errors={0: "no kernel image"}), dict(op_error="differs")):
        for named in (True, False):
            (problem,) = find_problems(well(library_named=named, **changes))
            assert ("unset JAXPRIMS_LIBRARY" in problem.remedy) == named


@pytest.mark.parametrize(
    "changes, what, remedy",
    [
        (dict(plugins=[], jax_gpus=[]), "no CUDA plugin", 'pip install "jaxprims[cuda13]"'),
        (
            dict(plugins=[], jax_gpus=[], gpus=[Gpu("A100", "8.0", "535.104.05")]),
            "no CUDA plugin",
            'pip install "jaxprims[cuda12]"',
        ),
        (dict(jax_gpus=[], jax_platforms="cpu"), "JAX_PLATFORMS=cpu", "unset JAX_PLATFORMS"),
        (dict(jax_gpus=[], jax_error="CUDA_ERROR_NO_DEVICE"), "CUDA_ERROR_NO_DEVICE", "nvidia-smi"),
        (
            dict(library_loaded=False, library_reason="built for FFI API 0.5", library_remedy="pip install this"),
            "built for FFI API 0.5",
            "pip install this",
        ),
        (
            dict(device_errors={0: "cudaErrorNoKernelImageForDevice: no kernel image"}),
            "do not run on cuda:0: cudaErrorNoKernelImageForDevice",
            "JAXPRIMS_CUDA_ARCHS='90a-real'",
        ),
        (dict(op_error="softmax as a kernel differs from the reference by 1"), "differs", "report"),
    ],
)
def test_a_gpu_whose_kernels_cannot_run(changes, what, remedy):
    facts = well(**changes)
    (problem,) = find_problems(facts)
    assert what in problem.what
    assert remedy in problem.remedy
    text = render(facts, [problem])
    assert problem.what in text and problem.remedy in text and "All well" not in text


def test_two_faults_are_two_problems():
    facts = well(plugins=[], jax_gpus=[], library_loaded=False, library_reason="gone", library_remedy="make build")
    assert [p.remedy for p in find_problems(facts)][1] == "make build"
    assert len(find_problems(facts)) == 2


def test_a_device_file_alone_counts_as_a_gpu():
    facts = Facts(device_file=True, library_loaded=True)
    assert "no CUDA plugin" in find_problems(facts)[0].what


def test_examine_reads_this_machine(monkeypatch):
    table = "NVIDIA H200, 9.0, 580.65.06\nNVIDIA H200, 9.0, 580.65.06\n"
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: SimpleNamespace(stdout=table))
    missing = ffi.Status(False, None, "the file is not there", "make build", None, (0, 4), None)
    monkeypatch.setattr(ffi, "status", lambda: missing)
    facts = doctor.examine()
    assert facts.gpus == [H200, H200]
    assert facts.versions["jax"] == jax.__version__
    assert (facts.runtime_api, facts.library_api) == ("0.4", None)
    assert facts.library_reason == "the file is not there"


@pytest.mark.parametrize("error", [FileNotFoundError("nvidia-smi"), subprocess.CalledProcessError(9, "nvidia-smi")])
def test_no_driver_means_no_gpus(monkeypatch, error):
    def fails(*args, **kwargs):
        raise error

    monkeypatch.setattr(subprocess, "run", fails)
    assert doctor._driver_gpus() == []


@pytest.mark.parametrize("changes, code", [({}, 0), (dict(library_loaded=False, library_reason="gone"), 1)])
def test_exit_code_and_print(monkeypatch, capsys, changes, code):
    monkeypatch.setattr(doctor, "examine", lambda: well(**changes))
    assert doctor.main() == code
    out = capsys.readouterr().out
    assert ("PROBLEM" in out) == bool(code)
    assert ("mend:" in out) == bool(code)


@pytest.mark.parametrize("number, text", [(3, "0.3"), (1002, "1.2"), ((0, 5), "0.5"), (None, None)])
def test_api_versions_in_words(number, text):
    assert doctor._api(number) == text


@pytest.mark.gpu
def test_the_doctor_is_content_with_this_gpu(capsys):
    assert doctor.main() == 0, capsys.readouterr().out
