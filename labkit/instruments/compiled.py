"""Compiles Triton kernels for GPUs that are not here, and compares the shared memory they want with what cards have.

Launchers are called on CPU tensors as if those lay on a GPU; what they would launch is compiled down to machine code by
the assembler that comes with Triton. It shows what the interpreter passes over: shapes and types that a GPU refuses,
tiles too large for its memory. Nothing runs, so nothing is said about answers or speed.

    python -m labkit.instruments.compiled --lab 06 --impl labs [--task 2]
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labkit.errors import not_attempted_text
from labkit.launch import VARIABLE, Started, collecting, interpreting, triton_fault
from labkit.loader import LabPackage
from labkit.manifest import ROOT, Manifest, load_manifest
from labkit.paths import cache_dir

SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 120: 99 << 10}
"""Shared memory that one program may use, by compute capability: A100, H100, and the RTX 50 cards.

Source: CUDA C++ Programming Guide, technical specifications per compute capability.
"""


@dataclass(frozen=True)
class Case:
    """One call of a launcher, with arguments as a model would give them.

    Args:
        task: number of the task whose kernels it starts.
        module: where the launcher stands.
        function: the launcher's name.
        arguments: makes its arguments, on the CPU.
        capabilities: the GPUs that the kernels are meant for.
    """

    task: int
    module: str
    function: str
    arguments: Callable[[], tuple[Any, ...]]
    capabilities: tuple[int, ...] = tuple(SHARED_BYTES)


@dataclass(frozen=True)
class Compilation:
    """What came of one kernel for one GPU.

    Args:
        task: the task's number.
        kernel: the kernel's name.
        constants: its `tl.constexpr` parameters and launch options, in words.
        capability: 80, 90 or 120.
        shared_bytes: shared memory that a program takes; None if it did not compile.
        error: what the compiler said, if it refused.
        not_attempted: whether it refused because the kernel is an untouched stub.
        choice: numbers those that a tuner may choose among for the same launch; of these, one must fit.
    """

    task: int
    kernel: str
    constants: str
    capability: int
    shared_bytes: int | None
    error: str | None = None
    not_attempted: bool = False
    choice: int = 0

    @property
    def fits(self) -> bool:
        """Whether it compiled, into no more shared memory than the card has."""
        return self.shared_bytes is not None and self.shared_bytes <= SHARED_BYTES[self.capability]

    def __str__(self) -> str:
        where = f"task {self.task:>2}  {self.kernel:<28} sm_{self.capability:<4}"
        if self.shared_bytes is None:
            return f"{where} {'not attempted' if self.not_attempted else 'FAILED'}: {self.error}"
        verdict = "fits" if self.fits else "TOO LARGE"
        limit = SHARED_BYTES[self.capability] >> 10
        return f"{where} {self.shared_bytes / 1024:6.2f} of {limit:>3} KiB  {verdict:<9}  {self.constants}"


def compile_case(package: LabPackage, case: Case) -> Iterator[Compilation]:
    """Compiles every kernel that a call starts, for every GPU and every configuration of its tuner.

    Args:
        package: the mounted lab.
        case: the call.
    """
    if interpreting():
        raise RuntimeError(f"kernels are compiled in a process without {VARIABLE}=1, and here it is set")
    try:
        with collecting() as started:
            getattr(package.module(case.module), case.function)(*case.arguments())
    except Exception as error:
        stub, text = not_attempted_text(error), f"{type(error).__name__}: {error}"
        for capability in case.capabilities:
            yield Compilation(case.task, case.function, "", capability, None, stub or text, stub is not None)
        return
    if not started:
        text = f"{case.function} started no kernel; launch it through labkit.launch.launch"
        yield Compilation(case.task, case.function, "", case.capabilities[0], None, text)
    for launch in started:
        for capability in case.capabilities:
            for choice, (kernel, meta) in enumerate(_choices(launch)):
                yield _compile(case.task, kernel, launch.args, meta, capability, choice)


def _choices(launch: Started) -> Iterator[tuple[Any, dict[str, Any]]]:
    """The bare kernel with its parameters by name; one for each configuration if it is tuned."""
    kernel, meta = launch.kernel, launch.meta
    if configs := getattr(kernel, "configs", None):
        for config in configs:
            yield kernel.fn, {**meta, **config.all_kwargs()}
    else:
        yield kernel, meta


def _compile(
    task: int, kernel: Any, args: tuple[Any, ...], meta: dict[str, Any], capability: int, choice: int
) -> Compilation:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.compiler import compile as triton_compile
    from triton.runtime.jit import create_function_from_signature

    target = GPUTarget("cuda", capability, 32)
    backend = make_backend(target)
    constants = ", ".join(f"{name}={value}" for name, value in meta.items())
    types = " ".join(sorted({str(arg.dtype).removeprefix("torch.") for arg in args if hasattr(arg, "data_ptr")}))
    label = f"{types}; {constants}"
    name = kernel.__name__
    try:
        # The way that a launch goes, without a device: Triton specializes on types, on 1 and on divisibility by 16.
        bind = create_function_from_signature(kernel.signature, kernel.params, backend)
        bound, specialization, options = bind(*args, debug=False, **meta)
        parsed, signature, constexprs, attributes = kernel._pack_args(
            backend, {"debug": False, **meta}, bound, specialization, options
        )
        source = ASTSource(kernel, signature, constexprs, attributes)
        compiled = triton_compile(source, target=target, options=parsed.__dict__)
    except Exception as error:
        stub = not_attempted_text(error)
        return Compilation(task, name, label, capability, None, stub or str(error), stub is not None, choice)
    return Compilation(task, name, label, capability, int(compiled.metadata.shared), choice=choice)


def faults(compilations: Iterable[Compilation]) -> list[Compilation]:
    """Those that a GPU could not run: they do not compile, or do not fit and leave a tuner no choice that does."""
    groups: list[list[Compilation]] = []
    for compilation in compilations:
        if compilation.choice == 0:
            groups.append([])
        groups[-1].append(compilation)
    found = []
    for group in groups:
        refused = [one for one in group if one.shared_bytes is None]
        found += refused or ([] if any(one.fits for one in group) else group)
    return found


def load_cases(manifest: Manifest) -> list[Case]:
    """The calls that a lab's authors have written down, in `tests/compile_cases.py`.

    Raises:
        ValueError: the lab has no such file.
    """
    path = manifest.tests_folder / "compile_cases.py"
    if not path.is_file():
        raise ValueError(f"lab {manifest.id} has no kernels to compile: there is no {path}")
    spec = importlib.util.spec_from_file_location(f"compile_cases_{manifest.id}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return list(module.CASES)


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns its exit code: 1 for a fault, 0 if all compile or are not attempted yet."""
    parser = argparse.ArgumentParser(prog="python -m labkit.instruments.compiled", description=__doc__.split("\n")[0])
    parser.add_argument("--lab", default="06", help="two digits")
    parser.add_argument("--impl", default="labs", help="labs, solutions, or a folder with the modules")
    parser.add_argument("--task", type=int, default=None, help="the kernels of this task only")
    parser.add_argument("--trust", action="store_true", help="import code from a folder outside this repository")
    parser.add_argument("--cards", type=int, nargs="+", choices=SHARED_BYTES, default=list(SHARED_BYTES), help="GPUs")
    parser.add_argument("--faults", action="store_true", help="print faults only")
    options = parser.parse_args(arguments)
    os.environ.pop(VARIABLE, None)
    os.environ.setdefault("TRITON_CACHE_DIR", str(cache_dir() / "triton"))
    try:
        manifest = load_manifest(options.lab)
        folder = {"labs": manifest.folder, "solutions": manifest.solutions}.get(options.impl, Path(options.impl))
        if not folder.resolve().is_relative_to(ROOT) and not options.trust:
            raise ValueError(f"{folder} lies outside the workbook; add --trust if you trust its author")
        cases = [
            dataclasses.replace(case, capabilities=tuple(card for card in case.capabilities if card in options.cards))
            for case in load_cases(manifest)
            if options.task in (None, case.task)
        ]
        package = LabPackage(f"lab{manifest.id}", folder, _importable(manifest, folder))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if fault := triton_fault():
        print(f"kernels were not compiled, and are not verified here: {fault}")
        return 0
    package.mount()
    compilations = []
    for case in cases:
        for compilation in compile_case(package, case):
            if not options.faults:
                print(compilation, flush=True)
            compilations.append(compilation)
    wrong = [one for one in faults(compilations) if not one.not_attempted]
    if options.faults:
        print(*wrong, sep="\n", end="\n" if wrong else "")
    fine = sum(one.fits for one in compilations)
    print(f"{fine} of {len(compilations)} kernels compile and fit, {len(wrong)} faults; not verified on a GPU")
    return 1 if wrong else 0


def _importable(manifest: Manifest, folder: Path) -> list[str]:
    """The lab's modules, and those beside them that its launchers choose on some cards."""
    return sorted({*manifest.modules, *(path.stem for path in folder.glob("*.py") if path.stem != "__init__")})


if __name__ == "__main__":
    sys.exit(main())
