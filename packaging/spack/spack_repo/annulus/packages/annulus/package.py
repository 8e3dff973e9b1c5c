import os

from spack_repo.builtin.build_systems.generic import Package

from spack.package import *


class Annulus(Package):
    """Exact attention, forward and backward, over sequences that do not fit one device: ring
    attention for programs of C, C++, Fortran and Python, over threads, MPI or functions of the
    program."""

    # `cargo xtask dist` makes the archive; it holds all crates, so the build needs no network
    manual_download = True

    license("MIT OR Apache-2.0")

    version("0.1.0")

    variant("mpi", default=True, description="Rings over MPI communicators")
    # they load their drivers at run time: nothing to build
    variant("cuda", default=False, description="Computes on NVIDIA GPUs")
    variant("nccl", default=False, description="Blocks over NCCL communicators of the program")
    variant("wgpu", default=False, description="Computes on GPUs through Vulkan")
    # the source of the module is always installed
    variant("fortran", default=False, description="Compiles the Fortran module")
    variant("python", default=False, description="The Python package")

    # cargo links with the compiler of C
    depends_on("c", type="build")
    depends_on("rust@1.90:", type="build")

    with when("+mpi"):
        depends_on("mpi")
        # libclang reads mpi.h
        depends_on("llvm+clang", type="build")

    with when("+fortran"):
        depends_on("fortran", type="build")

    with when("+python"):
        extends("python")
        depends_on("python@3.10:", type=("build", "run"))
        depends_on("py-pip", type="build")
        depends_on("py-maturin@1.9:1", type="build")
        depends_on("py-numpy@1.24:", type=("build", "run"))
        depends_on("py-mpi4py@4:", type=("build", "run"), when="+mpi")

    def url_for_version(self, version):
        return f"file://{os.getcwd()}/annulus-{version}.tar.gz"

    def setup_build_environment(self, env: EnvironmentModifications) -> None:
        env.set("CARGO_HOME", join_path(self.stage.path, "cargo"))
        if self.spec.satisfies("+mpi"):
            env.set("MPICC", self.spec["mpi"].mpicc)
            env.set("LIBCLANG_PATH", self.spec["llvm"].prefix.lib)

    def features(self, *names):
        return [name for name in names if self.spec.satisfies(f"+{name}")]

    def install(self, spec, prefix):
        arguments = ["xtask", "install", "--offline", "--prefix", prefix]
        features = self.features("mpi", "cuda", "nccl", "wgpu")
        if features:
            arguments += ["--features", ",".join(features)]
        which("cargo", required=True)(*arguments)
        if spec.satisfies("+fortran"):
            self.install_fortran(prefix)
        if spec.satisfies("+python"):
            self.install_python(spec, prefix)

    def install_fortran(self, prefix):
        source = join_path(prefix, "share", "annulus", "annulus.f90")
        # every compiler writes the module into the current folder
        with working_dir(join_path(prefix, "include")):
            Executable(os.environ["FC"])("-c", "-fPIC", source, "-o", "annulus.o")
            archive = join_path(prefix, "lib", "libannulus_fortran.a")
            which("ar", required=True)("rcs", archive, "annulus.o")
            os.remove("annulus.o")

    def install_python(self, spec, prefix):
        features = ["link-mpi", *self.features("mpi", "cuda", "wgpu")]
        build = f"--locked --offline --no-default-features --features {','.join(features)}"
        pip = ["-m", "pip", "install", "--no-deps", "--no-build-isolation", "--no-index"]
        spec["python"].command(*pip, f"--prefix={prefix}", "-C", f"build-args={build}", "./python")
