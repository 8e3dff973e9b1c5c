//! Errors of machines that lack a driver, a GPU, a compiler or NCCL. The machines are simulated
//! with mock libraries, which are loaded before the real ones.

use std::{fmt::Write as _, fs, process::Command};

use crate::support::{Folder, RunResult};

/// Returns the names of the library functions in a table of the sources: words with a prefix.
fn names(table: &str, prefix: &str) -> Vec<String> {
    let is_name = |word: &&str| {
        let rest = word.strip_prefix(prefix).map(|rest| rest.strip_prefix("rtc").unwrap_or(rest));
        rest.is_some_and(|rest| rest.starts_with(char::is_uppercase))
    };
    let words = table.split(|c: char| !c.is_alphanumeric() && c != '_').filter(is_name);
    let mut names: Vec<String> = words.map(str::to_owned).collect();
    names.sort();
    names.dedup();
    assert!(names.len() > 10, "{prefix}: {names:?}");
    names
}

const TABLES: &str = include_str!("../../../device-cuda/src/symbols.rs");

/// Driver functions that report one GPU of compute capability 9.0.
const DRIVER: [(&str, &str); 3] = [
    ("cuDeviceGetCount", "int cuDeviceGetCount(int *count) { *count = 1; return 0; }"),
    (
        "cuDeviceGetName",
        "int cuDeviceGetName(char *name) { name[0] = 'X'; name[1] = 0; return 0; }",
    ),
    (
        "cuDeviceGetAttribute",
        "int cuDeviceGetAttribute(int *value, int which) { *value = which == 75 ? 9 : 0; \
         return 0; }",
    ),
];

/// Compiler functions that report support of that GPU.
const COMPILER: [(&str, &str); 3] = [
    (
        "nvrtcVersion",
        "int nvrtcVersion(int *major, int *minor) { *major = 13; *minor = 0; return 0; }",
    ),
    (
        "nvrtcGetNumSupportedArchs",
        "int nvrtcGetNumSupportedArchs(int *count) { *count = 1; return 0; }",
    ),
    ("nvrtcGetSupportedArchs", "int nvrtcGetSupportedArchs(int *list) { *list = 90; return 0; }"),
];

/// Simulated machine: a folder of libraries, of which an empty file is a missing one.
struct Machine {
    folder: Folder,
}

impl Machine {
    /// Creates a machine without any of these libraries.
    fn new(name: &str) -> Self {
        let folder = Folder::new(name);
        for library in [
            "libcuda.so.1",
            "libcuda.so",
            "libnvrtc.so.13",
            "libnvrtc.so.12",
            "libnvrtc.so",
            "libnccl.so.2",
            "libnccl.so",
            "librccl.so.1",
            "libamdhip64.so.7",
            "libamdhip64.so.6",
            "libamdhip64.so.5",
            "libhiprtc.so.7",
            "libhiprtc.so.6",
            "libhiprtc.so.5",
        ] {
            // not a library, but found before a real one
            fs::write(folder.path(library), "").unwrap();
        }
        Self { folder }
    }

    /// Adds a library with `functions`, which return 0 unless `written` has their source.
    fn with(self, library: &str, functions: &[String], written: &[(&str, &str)]) -> Self {
        let mut source = String::new();
        for name in functions {
            match written.iter().rev().find(|(known, _)| known == name) {
                Some((_, text)) => writeln!(source, "{text}").unwrap(),
                None => writeln!(source, "int {name}() {{ return 0; }}").unwrap(),
            }
        }
        let from = self.folder.path("library.c");
        let to = self.folder.path(library);
        fs::write(&from, source).unwrap();
        let compiled = Command::new("cc")
            .args(["-shared", "-fPIC", "-o"])
            .arg(&to)
            .arg(&from)
            .output()
            .unwrap();
        assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
        self
    }

    fn with_driver(self, written: &[(&str, &str)]) -> Self {
        self.with("libcuda.so.1", &names(TABLES, "cu"), &[&DRIVER, written].concat())
    }

    fn with_compiler(self, written: &[(&str, &str)]) -> Self {
        self.with("libnvrtc.so.13", &names(TABLES, "nvrtc"), &[&COMPILER, written].concat())
    }

    fn run(&self, arguments: &str) -> RunResult {
        RunResult::from(
            self.folder
                .command(arguments)
                .env("LD_LIBRARY_PATH", self.folder.path("."))
                // without the images of a compiler that ran here
                .env("ANNULUS_KERNEL_CACHE", "none")
                .output()
                .unwrap(),
        )
    }

    /// Checks that computing on its GPU fails with `what`, and that doctor prints the same.
    fn lacks(&self, what: &str) {
        self.lacks_for("cuda", what);
    }

    fn lacks_for(&self, backend: &str, what: &str) {
        self.run(&format!("bench --backend {backend} --ns 8")).failed(1, &[what]);
        self.prints(backend, what);
    }

    /// Checks that doctor prints a line of a backend that ends with `what`.
    fn prints(&self, backend: &str, what: &str) {
        let doctor = self.run("doctor").out;
        let start = format!("{backend} ");
        assert!(
            doctor.lines().any(|line| line.starts_with(&start) && line.ends_with(what)),
            "{what}: {doctor}"
        );
    }
}

#[test]
fn each_missing_component_is_named() {
    let this_machine = |what: &str| format!("CUDA is not supported by this machine: {what}");
    Machine::new("cuda_no_driver").lacks(&this_machine("no driver (libcuda.so.1 was not found)"));
    let without_launch: Vec<String> =
        names(TABLES, "cu").into_iter().filter(|name| name != "cuLaunchKernel").collect();
    Machine::new("cuda_old_driver")
        .with("libcuda.so.1", &without_launch, &DRIVER)
        .lacks(&this_machine("its library has no cuLaunchKernel"));
    // only warpgroups need tensor maps
    let without_maps: Vec<String> =
        names(TABLES, "cu").into_iter().filter(|name| name != "cuTensorMapEncodeTiled").collect();
    let machine = Machine::new("cuda_11").with("libcuda.so.1", &without_maps, &DRIVER);
    let doctor = machine.with_compiler(&[]).run("doctor").out;
    assert!(doctor.contains("X, compute capability 9.0, NVRTC 13.0, level matrix"), "{doctor}");
    Machine::new("cuda_no_gpu")
        .with_driver(&[("cuInit", "int cuInit() { return 100; }")])
        .lacks(&this_machine("no GPU"));
    Machine::new("cuda_other_driver")
        .with_driver(&[("cuInit", "int cuInit() { return 803; }")])
        .lacks(&this_machine("the driver does not start (CUDA_ERROR_SYSTEM_DRIVER_MISMATCH)"));
    Machine::new("cuda_old_gpu")
        .with_driver(&[(
            "cuDeviceGetAttribute",
            "int cuDeviceGetAttribute(int *value, int which) { *value = which == 75 ? 7 : 5; \
             return 0; }",
        )])
        .lacks(&this_machine("X has compute capability 7.5, 8.0 or newer is needed"));
    Machine::new("cuda_no_compiler")
        .with_driver(&[])
        .lacks(&this_machine("no run-time compiler (libnvrtc.so was not found)"));
    let without_cubin: Vec<String> =
        names(TABLES, "nvrtc").into_iter().filter(|name| name != "nvrtcGetCUBIN").collect();
    Machine::new("cuda_old_compiler")
        .with_driver(&[])
        .with("libnvrtc.so.13", &without_cubin, &COMPILER)
        .lacks(&this_machine("its library has no nvrtcGetCUBIN"));
    Machine::new("cuda_new_compiler")
        .with_driver(&[])
        .with_compiler(&[(
            "nvrtcGetSupportedArchs",
            "int nvrtcGetSupportedArchs(int *list) { *list = 100; return 0; }",
        )])
        .lacks("compute capability 9.0 is not supported by NVRTC 13.0");
}

#[test]
fn doctor_lists_the_gpu_and_the_compiler() {
    let machine = Machine::new("cuda_all").with_driver(&[]).with_compiler(&[]);
    machine.prints("cuda", "X, compute capability 9.0, NVRTC 13.0, level warpgroup");
    machine
        .run("bench --backend cuda --device 1 --ns 8")
        .failed(1, &["device: got 1", "a GPU's number, below 1"]);
}

/// Functions of HIP that report one GPU, whose name is in the structure of ROCm 6 or of ROCm 5.
fn hip_driver(properties: &str, offset: usize, name: &str) -> Vec<(String, String)> {
    let text = |name: &str, body: &str| (name.to_owned(), body.to_owned());
    vec![
        text("hipGetDeviceCount", "int hipGetDeviceCount(int *count) { *count = 1; return 0; }"),
        text(
            "hipDeviceGetName",
            "int hipDeviceGetName(char *name) { name[0] = 'X'; name[1] = 0; return 0; }",
        ),
        text(
            "hipDeviceGetAttribute",
            "int hipDeviceGetAttribute(int *value, int which) { *value = which == 63 ? 304 : 1; \
             return which == 63 || which == 19 ? 0 : 1; }",
        ),
        (
            properties.to_owned(),
            format!(
                "int {properties}(char *to) {{ const char *from = \"{name}\"; to += {offset}; \
                 do *to++ = *from; while (*from++); return 0; }}"
            ),
        ),
        text(
            "hipRuntimeGetVersion",
            "int hipRuntimeGetVersion(int *version) { *version = 60342134; return 0; }",
        ),
        text(
            "hiprtcVersion",
            "int hiprtcVersion(int *major, int *minor) { *major = 9; *minor = 0; return 0; }",
        ),
    ]
}

/// Names of the functions of HIP and hipRTC that are used, as `hip_runtime_api.h` and `hiprtc.h` have
/// them.
const HIP: &str = "\
    hipDeviceGet hipDeviceGetAttribute hipDeviceGetName hipEventCreateWithFlags hipEventDestroy \
    hipEventElapsedTime hipEventQuery hipEventRecord hipFree hipGetDevice hipGetDeviceCount \
    hipGetDeviceProperties hipGetDevicePropertiesR0600 hipHostFree hipHostMalloc hipInit hipMalloc \
    hipMemGetInfo hipMemcpyDtoDAsync hipMemcpyDtoHAsync hipMemcpyHtoDAsync hipModuleGetFunction \
    hipModuleLaunchKernel hipModuleLoadData hipModuleUnload hipRuntimeGetVersion hipSetDevice \
    hipStreamCreateWithFlags hipStreamDestroy hipStreamWaitEvent hiprtcCompileProgram \
    hiprtcCreateProgram hiprtcDestroyProgram hiprtcGetCode hiprtcGetCodeSize hiprtcGetProgramLog \
    hiprtcGetProgramLogSize hiprtcVersion";

#[test]
fn hip_is_found_in_the_libraries_of_rocm_5_and_6_and_what_is_missing_is_named() {
    let named = |is_one: fn(&str) -> bool| -> Vec<String> {
        HIP.split_whitespace().filter(|name| is_one(name)).map(str::to_owned).collect()
    };
    let compiler = named(|name| name.starts_with("hiprtc"));
    let with =
        |machine: Machine, library: &str, functions: &[String], written: &[(String, String)]| {
            let written: Vec<_> =
                written.iter().map(|(name, text)| (name.as_str(), text.as_str())).collect();
            machine.with(library, functions, &written)
        };
    let this_machine = |what: &str| format!("HIP is not supported by this machine: {what}");
    let six = hip_driver("hipGetDevicePropertiesR0600", 1160, "gfx942:sramecc+:xnack-");
    let driver = named(|name| !name.starts_with("hiprtc"));
    let machine = with(Machine::new("hip_6"), "libamdhip64.so.6", &driver, &six);
    machine.lacks_for("hip", &this_machine("no run-time compiler (libhiprtc.so was not found)"));
    let machine = with(machine, "libhiprtc.so.6", &compiler, &six);
    machine.prints("hip", "X, gfx942:sramecc+:xnack-, hipRTC 9, HIP 60342134, level matrix");
    machine
        .run("bench --backend hip --device 1 --ns 8")
        .failed(1, &["device: got 1", "a GPU's number, below 1"]);
    // ROCm 5: an older structure, and hipRTC in the driver's library
    let five = hip_driver("hipGetDeviceProperties", 396, "gfx90a:sramecc+:xnack-");
    let all = named(|name| name != "hipGetDevicePropertiesR0600");
    let machine = with(Machine::new("hip_5"), "libamdhip64.so.5", &all, &five);
    machine.prints("hip", "X, gfx90a:sramecc+:xnack-, hipRTC 9, HIP 60342134, level matrix");
    Machine::new("hip_none")
        .lacks_for("hip", &this_machine("no driver (libamdhip64.so was not found)"));
    let without_launch: Vec<String> =
        all.iter().filter(|name| *name != "hipModuleLaunchKernel").cloned().collect();
    with(Machine::new("hip_old"), "libamdhip64.so.5", &without_launch, &five)
        .lacks_for("hip", &this_machine("its library has no hipModuleLaunchKernel"));
    // HIP's answer without a GPU
    let none = [five, vec![("hipInit".into(), "int hipInit() { return 101; }".into())]].concat();
    with(Machine::new("hip_no_gpu"), "libamdhip64.so.5", &all, &none)
        .lacks_for("hip", &this_machine("no GPU"));
}

#[cfg(feature = "nccl")]
#[test]
fn missing_and_unsuitable_nccl_and_rccl_is_named() {
    let nvidia = Machine::new("nccl_none").with_driver(&[]).with_compiler(&[]);
    transport_is_named(nvidia, "cuda", "NCCL", "libnccl.so.2");
    transport_is_named(amd("rccl_none", "libamdhip64.so.7"), "hip", "RCCL", "librccl.so.1");
    // the library of another ROCm: it loads the HIP that it was linked with
    let load = "int dlopen(const char *, int); __attribute__((constructor)) static void load() \
                { dlopen(\"libamdhip64.so.6\", 2); } int ncclGetVersion(int *version) \
                { *version = 22105; return 0; }";
    amd("rccl_of_another_rocm", "libamdhip64.so.7")
        .with("libamdhip64.so.6", &[], &[])
        .with("librccl.so.1", &nccl_names(), &[("ncclGetVersion", load)])
        .run("bench --backend hip --transport nccl --ns 8 --ranks 2")
        .failed(1, &["RCCL is not supported by this machine: it needs another HIP: ", "so.6"]);
}

#[cfg(feature = "nccl")]
fn nccl_names() -> Vec<String> {
    names(include_str!("../../../device-cuda/src/nccl.rs"), "nccl")
}

/// A machine with an MI300X.
#[cfg(feature = "nccl")]
fn amd(name: &str, driver: &str) -> Machine {
    let written = hip_driver("hipGetDevicePropertiesR0600", 1160, "gfx942:sramecc+:xnack-");
    let written: Vec<_> =
        written.iter().map(|(name, text)| (name.as_str(), text.as_str())).collect();
    let all: Vec<String> = HIP.split_whitespace().map(str::to_owned).collect();
    let [compiler, runtime]: [Vec<String>; 2] = [true, false].map(|compiles| {
        all.iter().filter(|name| name.starts_with("hiprtc") == compiles).cloned().collect()
    });
    Machine::new(name).with(driver, &runtime, &written).with("libhiprtc.so.7", &compiler, &written)
}

/// Checks the errors of a machine with one GPU: without the library of a transport, with ones that
/// do not suit, and with one that does.
#[cfg(feature = "nccl")]
fn transport_is_named(machine: Machine, backend: &str, name: &str, library: &str) {
    let bench = format!("bench --backend {backend} --transport nccl --ns 8 --ranks 2");
    let this_machine = |what: &str| format!("{name} is not supported by this machine: {what}");
    let version = |number: u32| {
        format!("int ncclGetVersion(int *version) {{ *version = {number}; return 0; }}")
    };
    let lacks = |machine: &Machine, what: &str| machine.run(&bench).failed(1, &[what]);
    lacks(&machine, &this_machine(&format!("no library ({library} was not found)")));
    let without_recv: Vec<String> =
        nccl_names().into_iter().filter(|name| name != "ncclRecv").collect();
    let machine = machine.with(library, &without_recv, &[]);
    lacks(&machine, &this_machine("its library has no ncclRecv"));
    let of_version = |machine: Machine, number| {
        machine.with(library, &nccl_names(), &[("ncclGetVersion", &version(number))])
    };
    let machine = of_version(machine, 21200);
    lacks(&machine, &this_machine("its version is 21200, 21400 or newer is needed"));
    let machine = of_version(machine, 22809);
    machine.run(&bench).failed(
        1,
        &["rank 1 without a GPU of its own", "this machine, which has 1", "--transport threads"],
    );
    machine.prints(&name.to_lowercase(), "version 22809");
}
