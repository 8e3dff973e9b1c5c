"""Compiles the shim by which a build that loads MPI uses one without the standard ABI of MPI 5.0.

    python -m annulus_attention.mpi_shim libannulus_mpi_shim.so
    export ANNULUS_MPI_LIBRARY=$PWD/libannulus_mpi_shim.so

The MPI is that of the compiler wrapper ``$MPICC`` (default: ``mpicc``), and must be mpi4py's.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from . import _annulus


def main(arguments: list[str]) -> int:
    """Compiles the shim. Returns the exit status of the command."""
    if len(arguments) != 1:
        print("usage: python -m annulus_attention.mpi_shim OUTPUT.so", file=sys.stderr)
        return 2
    if not _annulus.HAS_MPI or _annulus.LINKS_MPI:
        print("annulus_attention.mpi_shim: this build of annulus loads no MPI", file=sys.stderr)
        return 1
    compiler = os.environ.get("MPICC", "mpicc")
    with TemporaryDirectory() as folder:
        source = Path(folder) / "annulus_mpi_shim.c"
        source.write_text(_annulus.MPI_SHIM)
        command = [compiler, "-shared", "-fPIC", "-O2", "-o", arguments[0], str(source)]
        try:
            return subprocess.run(command, check=False).returncode
        except OSError as error:
            print(f"annulus_attention.mpi_shim: {compiler}: {error.strerror}", file=sys.stderr)
            return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
