//! Several devices in one ring, and several adapters of one machine as its ranks. Without two equal
//! adapters, a process of its own finds lavapipe twice.

use annulus_conformance::{suite, wgpu::WgpuRing};
use annulus_core::DType;
use annulus_wgpu::Options;

use super::{F32, open};

#[test]
fn ranks_on_two_devices_hold() {
    let (Some(first), Some(second)) = (open(&Options::default()), open(&Options::default())) else {
        return;
    };
    suite::random_cases(&WgpuRing::new(first.clone()).and(second.clone()).only(F32), 0..6).unwrap();
    let halves = WgpuRing::on_host(first).and(second).only(&[DType::F16]);
    suite::random_cases(&halves, 100..104).unwrap();
}

#[cfg(target_os = "linux")]
mod adapters {
    use std::path::{Path, PathBuf};

    use annulus::{
        Attention, Dims, Plan, Tensors,
        backend::WgpuDevices,
        comm::threads::{self, each_rank},
    };
    use annulus_wgpu::Gpu;
    use ndarray::Array4;

    use super::super::{adapter, this_program};

    /// Set for the process that has two equal adapters.
    const CHILD: &str = "ANNULUS_TEST_OF_ADAPTERS";

    const DIMS: Dims = Dims::new(1, 96, 2, 8);

    /// The body of the test, on a machine with at least two equal adapters.
    fn ring_of_adapters() {
        let equal = Gpu::list();
        assert!(equal.len() >= 2 && equal[0].is_same_kind(&equal[1]), "{equal:?}");
        let devices = WgpuDevices::find(None).expect("the adapters");
        assert_eq!(
            devices.count(),
            equal.iter().filter(|other| equal[0].is_same_kind(other)).count()
        );
        assert_eq!(WgpuDevices::find(Some(1)).expect("the second").count(), 1);
        let attention = Attention::new().causal(true);
        let ranks = devices.count() + 1;
        each_rank(threads::ring(ranks), |_, transport| {
            let (backend, transport) = devices.rank(transport)?;
            let mut plan = Plan::with_backend(&attention, DIMS, backend, transport)?;
            let rows = annulus_core::index(plan.q_rows().len());
            let zeros = Array4::<f32>::zeros((1, rows, DIMS.q_heads, DIMS.head_dim));
            plan.forward(&Tensors::new(zeros.view(), zeros.view(), zeros.view())).map(drop)
        })
        .expect("a pass");
        let uploaded = |index| devices.get(index).expect("a device").transfers().to_device;
        // each device is opened once, and the first has one rank more than the others
        assert_eq!(uploaded(ranks - 1), uploaded(0));
        assert!(uploaded(0) > uploaded(1) && uploaded(1) > 0);
        println!("ADAPTERS: {ranks} ranks");
    }

    /// Returns the manifest of lavapipe: that of the environment, or else of the system.
    fn lavapipe() -> Option<PathBuf> {
        let is_of_lavapipe = |path: &PathBuf| {
            path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("lvp"))
        };
        if let Some(paths) = std::env::var_os("VK_DRIVER_FILES") {
            return std::env::split_paths(&paths).find(is_of_lavapipe);
        }
        let manifests = std::fs::read_dir("/usr/share/vulkan/icd.d").ok()?;
        manifests.filter_map(Result::ok).map(|entry| entry.path()).find(is_of_lavapipe)
    }

    /// Returns the paths of two manifests of lavapipe, whose paths to the driver differ, so that
    /// the loader loads it twice; `None` if it is not there.
    fn twice(folder: &Path) -> Option<String> {
        let text = std::fs::read_to_string(lavapipe()?).ok()?;
        let (before, path) = text.split_once("\"library_path\": \"")?;
        let (path, after) = path.split_once('"')?;
        let (library, name) = path.rsplit_once('/')?;
        let last = library.rsplit_once('/')?.1;
        std::fs::create_dir_all(folder).ok()?;
        let paths = [path.to_owned(), format!("{library}/../{last}/{name}")];
        let manifest = |(number, path): (usize, String)| {
            let file = folder.join(format!("{number}.json"));
            let text = format!("{before}\"library_path\": \"{path}\"{after}");
            std::fs::write(&file, text).ok()?;
            Some(file.display().to_string())
        };
        paths
            .into_iter()
            .enumerate()
            .map(manifest)
            .collect::<Option<Vec<_>>>()
            .map(|all| all.join(":"))
    }

    #[test]
    fn ranks_use_equal_adapters_in_turn() {
        let Some(adapter) = adapter() else { return };
        if std::env::var_os(CHILD).is_some() {
            return ring_of_adapters();
        }
        if Gpu::list().iter().filter(|other| adapter.is_same_kind(other)).count() > 1
            && adapter.number == 0
        {
            return ring_of_adapters();
        }
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("adapters");
        let Some(manifests) = twice(&folder) else {
            eprintln!("NOT RUN: no lavapipe in VK_DRIVER_FILES or /usr/share/vulkan/icd.d");
            return;
        };
        let mut child = this_program();
        let name = "several::adapters::ranks_use_equal_adapters_in_turn";
        let child = child.args(["--exact", name, "--nocapture"]).env(CHILD, "1");
        // older Vulkan loaders read only the second variable
        let child = child.env("VK_DRIVER_FILES", &manifests).env("VK_ICD_FILENAMES", &manifests);
        // its ranks open devices beside each other, in which the validation layer has a data race
        // (scripts/with-validation)
        let child = child.env_remove("VK_INSTANCE_LAYERS");
        let output = child.env("ANNULUS_DEVICE", "0").output().expect("it starts");
        let text = String::from_utf8_lossy(&output.stdout);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && text.contains("ADAPTERS"), "{text}{errors}");
    }
}
