//! Checks what a level requires on the device before it is used at that level.
//!
//! [`crate::Level::Matrix`] requires:
//!
//! * Subgroups of at least 8 invocations in linear order. wgpu reports no size on Metal. Kernel:
//!   `step.wgsl`.
//! * Known products of cooperative matrices, by many workgroups at
//!   once and one after another in each, because an instruction that does not wait for another one
//!   may be right when the device is idle. Neither naga's translation nor the drivers are proven on
//!   all hardware: an earlier product was wrong on an NVIDIA H200
//!   (benches/record/wgpu.md). Kernel: `matrix_probe.wgsl`.

use annulus_core::{Error, Result};
use bytemuck::Pod;

use crate::{
    Gpu,
    choice::Matrices,
    kernels::{
        KernelVariant,
        matrices::{PROBE_COUNTS, PROBE_PRODUCT, probe_product},
        params::{ProbeParams, StepParams},
    },
    launch::{Arena, BoundResource, Commands},
    memory::USAGE,
};

/// Steps for which every error of order or transposition changes the product.
const STEPS: [u32; 2] = [7, 5];

/// Workgroups of the probe of matrices, and products of each: on a GPU enough to occupy it, with
/// 6.6 GFLOP. A software adapter, which computes one workgroup per core, would take seconds.
const fn probe_size(software: bool) -> (usize, u32) {
    if software { (4, 6) } else { (1000, 100) }
}

/// Factor of the shuffled numbers.
const STEP: u32 = 3;

/// Distance of the f16 numbers whose conversion is measured: 64 of them, most of them subnormal
/// (below 1024).
const UNPACK_STEP: u32 = 17;

/// Numbers that the probe of subgroups writes: size and three shuffles for each of 64 invocations.
const SUBGROUP_RESULTS: usize = 4 * 64;

impl Gpu {
    /// Checks what the level requires.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if subgroups are too small, or a shuffle or a product is wrong.
    pub(crate) fn probe(&self) -> Result<()> {
        let Some(matrices) = self.matrices() else { return Ok(()) };
        judge_subgroups(&self.shuffled()?, self.name())?;
        self.probe_as(matrices, |_| {})
    }

    /// Shuffles numbers on the device.
    fn shuffled(&self) -> Result<Vec<u32>> {
        self.results(KernelVariant::SubgroupProbe, SUBGROUP_RESULTS, STEP)
    }

    /// True if the device's conversion from f16 keeps subnormal numbers.
    pub(crate) fn probe_unpacking(&self) -> Result<bool> {
        match self.results(KernelVariant::UnpackProbe, 64, UNPACK_STEP) {
            Ok(results) => Ok(keeps_subnormals(&results)),
            // a device without the conversion rejects the kernel
            Err(error) => self.check_lost().map_or(Err(error), |()| Ok(false)),
        }
    }

    /// Runs one workgroup of a probe that writes `count` numbers.
    fn results(&self, variant: KernelVariant, count: usize, step: u32) -> Result<Vec<u32>> {
        self.run_probe(variant, 1, count, StepParams { step })
    }

    /// Runs a probe of which all workgroups together write `count` numbers.
    fn run_probe<T: Pod>(
        &self,
        variant: KernelVariant,
        groups: usize,
        count: usize,
        params: impl Pod,
    ) -> Result<Vec<T>> {
        let mut arena = Arena::default();
        let bytes = (size_of::<T>() * count) as u64;
        let result = self.create_buffer("probe", bytes, USAGE)?;
        let mut commands = Commands::new(self, &mut arena);
        let bindings = vec![BoundResource::whole(&result)];
        commands.launch(variant, groups as u64, bindings, |_| params)?;
        commands.submit()?;
        let mut all = Vec::with_capacity(count);
        self.read(&result, bytes, |bytes| {
            all.extend(bytemuck::pod_collect_to_vec::<u8, T>(bytes));
            Ok(())
        })?;
        Ok(all)
    }

    /// Computes products as the kernels do; `spoil` changes the results, for tests.
    fn probe_as(&self, matrices: Matrices, spoil: impl FnOnce(&mut [f32])) -> Result<()> {
        let (groups, rounds) = probe_size(self.is_software());
        let [left_step, right_step] = STEPS;
        let params = ProbeParams { left_step, right_step, rounds };
        let count = PROBE_PRODUCT + PROBE_COUNTS * groups;
        let variant = KernelVariant::MatrixProbe(matrices);
        let mut results = self.run_probe(variant, groups, count, params)?;
        spoil(&mut results);
        judge(&results, matrices, self.name())
    }
}

/// True if the results of the probe are the numbers as f16 represents them.
fn keeps_subnormals(results: &[u32]) -> bool {
    let exact = |(number, &bits): (u32, &u32)| {
        u16::try_from(UNPACK_STEP * number)
            .is_ok_and(|half| half::f16::from_bits(half).to_f32().to_bits() == bits)
    };
    results.len() == 64 && (0..).zip(results).all(exact)
}

/// Refuses a device unless its subgroups have at least 8 invocations, and shuffles exchange the
/// numbers of invocations whose indices differ in one bit.
fn judge_subgroups(results: &[u32], device: &str) -> Result<()> {
    let least = results.iter().step_by(4).min().copied().unwrap_or(0);
    let exchanged = (0..).zip(results.chunks(4)).all(|(lane, found)| {
        found.iter().skip(1).eq(&[1, 2, 4].map(|distance| STEP * (lane ^ distance)))
    });
    if least >= 8 && exchanged {
        return Ok(());
    }
    let why = if least < 8 { format!("subgroups of {least}") } else { "wrong shuffles".to_owned() };
    Err(Error::unsupported(format!("wgpu level matrix ({why})"), device))
}

/// Refuses a device unless all products are right.
fn judge(results: &[f32], matrices: Matrices, device: &str) -> Result<()> {
    let want = probe_product(STEPS);
    let (product, counts) = results.split_at(PROBE_PRODUCT.min(results.len()));
    let wrong_later = counts.iter().sum::<f32>();
    if product == want && wrong_later == 0.0 {
        return Ok(());
    }
    let size = matrices.size();
    let differs = |(got, want): (&f32, &f32)| got != want;
    let wrong = product.iter().zip(&want).filter(|&pair| differs(pair)).count();
    let first = product.iter().zip(&want).position(differs).map_or_else(String::new, |at| {
        format!(", first row {} column {}: {}, not {}", at / 32, at % 32, product[at], want[at])
    });
    Err(Error::unsupported(
        format!(
            "wgpu level matrix (wrong products of {size} × {size} matrices: {wrong} of {} elements \
             of the first one{first}; {wrong_later} of all)",
            want.len()
        ),
        device,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{KernelEdit, Level, Options};

    fn refuses(products: &[f32]) -> bool {
        [Matrices::new(8, 8), Matrices::new(16, 64)].into_iter().all(|matrices| {
            let refusal = judge(products, matrices, "a device");
            let size = format!("{0} × {0}", matrices.size());
            matches!(
                &refusal,
                Err(Error::Unsupported { what, by }) if what.contains(&size) && by == "a device"
            )
        })
    }

    /// 32 × 32 numbers in row order.
    type Square = Vec<f32>;

    fn transposed(of: &Square) -> Square {
        (0..1024).map(|at| of[32 * (at % 32) + at / 32]).collect()
    }

    /// left·right, with sums over the first `most` elements only.
    fn product(left: &Square, right: &Square, most: usize) -> Square {
        let sum = |row: usize, column: usize| {
            (0..most).map(|k| left[32 * row + k] * right[32 * k + column]).sum::<f32>()
        };
        (0..1024).map(|at| sum(at / 32, at % 32)).collect()
    }

    #[test]
    fn the_probe_refuses_small_subgroups_and_wrong_shuffles() {
        let results = |size: u32| -> Vec<u32> {
            (0..64).flat_map(|n| [size, STEP * (n ^ 1), STEP * (n ^ 2), STEP * (n ^ 4)]).collect()
        };
        let refused = |results: &[u32], why: &str| {
            let refusal = judge_subgroups(results, "a device");
            matches!(&refusal, Err(Error::Unsupported { what, .. }) if what.contains(why))
        };
        for size in [8, 16, 32, 64, 128] {
            assert_eq!(judge_subgroups(&results(size), "a device"), Ok(()));
            for at in [0, 1, 2, 3, 97, 254, 255] {
                let mut wrong = results(size);
                wrong[at] = 4;
                let why = if at % 4 == 0 { "subgroups of 4" } else { "wrong shuffles" };
                assert!(refused(&wrong, why), "{at}");
            }
        }
        assert!(refused(&[], "subgroups of 0"));
        // the device's own
        let Some(adapter) = Gpu::list().into_iter().next() else { return };
        if adapter.levels.contains(&Level::Matrix) {
            let gpu = Gpu::open(&Options { level: Some(Level::Matrix), ..Options::default() });
            assert_eq!(judge_subgroups(&gpu.unwrap().shuffled().unwrap(), "a device"), Ok(()));
        }
    }

    #[test]
    fn a_conversion_that_drops_subnormal_numbers_is_not_used() {
        let widened = |n: u32| f32::from(half::f16::from_bits((UNPACK_STEP * n) as u16));
        let mut results: Vec<u32> = (0..64).map(|n| widened(n).to_bits()).collect();
        assert!(keeps_subnormals(&results));
        // 60 · 17 is the largest subnormal one
        results[60] = 0;
        assert!(!keeps_subnormals(&results));
        assert!(!keeps_subnormals(&results[..60]));
        assert!(widened(60) < half::f16::MIN_POSITIVE.to_f32());
        assert!(widened(61) > half::f16::MIN_POSITIVE.to_f32());
    }

    #[test]
    fn devices_that_multiply_wrongly_are_refused() {
        let factor = |step: u32, most: u32| -> Square {
            (0..1024).map(|at| (at * step % most) as f32).collect()
        };
        let [left_step, right_step] = STEPS;
        let left = factor(left_step, 17);
        let right = factor(right_step, 13);
        let right_columns = transposed(&right);
        let want = product(&left, &right_columns, 32);
        assert_eq!(judge(&want, Matrices::new(16, 64), "a device"), Ok(()));
        for (n, wrong) in [
            product(&transposed(&left), &right_columns, 32),
            product(&left, &right, 32),
            transposed(&want),
            product(&left, &right_columns, 16),
            product(&left, &right_columns, 8),
            want.iter().map(|x| x - 1.0).collect(),
            vec![0.0; 1024],
            vec![f32::NAN; 1024],
        ]
        .iter()
        .enumerate()
        {
            assert!(refuses(wrong), "{n}");
        }
        // a single wrong element
        for at in [0, 17, 1023] {
            let mut products = want.clone();
            products[at] += 1.0;
            assert!(refuses(&products), "{at}");
        }
        assert!(refuses(&want[..512]));
        // a later product of another workgroup
        let mut results = want;
        results.resize(PROBE_PRODUCT + 3 * PROBE_COUNTS, 0.0);
        assert!(!refuses(&results));
        results[PROBE_PRODUCT + 2 * PROBE_COUNTS] = 1.0;
        assert!(refuses(&results));
    }

    #[test]
    fn a_device_with_a_wrong_product_is_refused() {
        let options = Options { level: Some(Level::Matrix), ..Options::default() };
        let can =
            Gpu::list().first().is_some_and(|adapter| adapter.levels.contains(&Level::Matrix));
        if !can {
            let required = std::env::var("ANNULUS_REQUIRE")
                .is_ok_and(|words| words.split(',').any(|word| word == "matrix"));
            assert!(!required, "ANNULUS_REQUIRE has matrix, and the first adapter has none");
            eprintln!("NOT RUN: no cooperative matrices");
            return;
        }
        let gpu = Gpu::open(&options).unwrap();
        let matrices = gpu.matrices().unwrap();
        assert_eq!(gpu.probe(), Ok(()));
        let is_refusal = |found: Result<()>| {
            let what = |error| match error {
                Error::Unsupported { what, .. } => what,
                error => panic!("{error}"),
            };
            found.map_err(what).is_err_and(|what| what.contains("wrong products"))
        };
        assert!(is_refusal(gpu.probe_as(matrices, |results| results[5] = 0.0)));
        // invocations that do not wait for each other
        for (from, to) in [
            ("workgroupBarrier();\n        {\n", "{\n"),
            ("}\n        workgroupBarrier();\n", "}\n"),
        ] {
            let edited = gpu.edited(KernelEdit { kernel: "matrix_probe", from, to }).unwrap();
            assert!(is_refusal(edited.probe()), "without {from}");
        }
    }
}
