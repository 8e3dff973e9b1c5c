import os

from spack_repo.builtin.build_systems.generic import Package

from spack.package import *


class Annulus(Package):
    """Exact attention, forward and backward, over sequences that do not fit one device: ring
    attention for programs of C, C++ and Fortran, over threads, MPI or functions of the program."""

    # `cargo xtask dist` makes the archive; it holds all crates, so the build needs no network
    manual_download = True

    license("MIT OR Apache-2.0")

    version("0.1.0")

    variant("mpi", default=True, description="Rings over MPI communicators")
    # they load their drivers at run time: nothing to build
    variant("cuda", default=False, description="Computes on NVIDIA GPUs")
    variant("nccl", default=False, description="Blocks over NCCL communicators of the program")
    variant("wgpu", default=False, description="Computes on GPUs through Vulkan")

    # cargo links with the compiler of C
    depends_on("c", type="build")
    depends_on("rust@1.90:", type="build")

    with when("+mpi"):
        depends_on("mpi")
        # libclang reads mpi.h
        depends_on("llvm+clang", type="build")

    def url_for_version(self, version):
        return f"file://{os.getcwd()}/annulus-{version}.tar.gz"

    def setup_build_environment(self, env: EnvironmentModifications) -> None:
        env.set("CARGO_HOME", join_path(self.stage.path, "cargo"))
        if self.spec.satisfies("+mpi"):
            env.set("MPICC", self.spec["mpi"].mpicc)
            env.set("LIBCLANG_PATH", self.spec["llvm"].prefix.lib)

    def install(self, spec, prefix):
        arguments = ["xtask", "install", "--offline", "--prefix", prefix]
        features = [name for name in ("mpi", "cuda", "nccl", "wgpu") if spec.satisfies(f"+{name}")]
        if features:
            arguments += ["--features", ",".join(features)]
        which("cargo", required=True)(*arguments)
