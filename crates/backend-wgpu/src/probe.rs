//! Checks cooperative matrices on a known product before a device is used at
//! [`crate::Level::Matrix`]: neither wgpu's translation nor the drivers are proven on all hardware,
//! and no device with 16 × 16 matrices was at hand. Kernel: `matrix_probe.wgsl`.

use annulus_core::{Error, Result};

use crate::{
    Gpu,
    kernels::{
        Variant,
        matrices::{PROBE_RESULTS, probe_result},
        params::ProbeParams,
    },
    launch::{Arena, BoundResource, Commands},
    level::Matrices,
    memory::USAGE,
};

/// Steps for which every error of order or transposition changes the result.
const PARAMS: ProbeParams = ProbeParams { left_step: 7, right_step: 5 };

impl Gpu {
    /// Computes the products on the device in every way in which the kernels do.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if a product is wrong.
    pub(crate) fn probe(&self, matrices: Matrices) -> Result<()> {
        self.probe_as(matrices, |_| {})
    }

    /// As [`Gpu::probe`]; `spoil` changes the computed products, for tests.
    fn probe_as(&self, matrices: Matrices, spoil: impl FnOnce(&mut [f32])) -> Result<()> {
        let mut arena = Arena::default();
        let bytes = 4 * PROBE_RESULTS as u64;
        let result = self.create_buffer("probe", bytes, USAGE)?;
        let mut commands = Commands::new(self, &mut arena);
        commands.launch(
            Variant::MatrixProbe(matrices),
            1,
            vec![BoundResource::whole(&result)],
            |_| PARAMS,
        )?;
        commands.submit()?;
        let mut products = Vec::with_capacity(PROBE_RESULTS);
        self.read(&result, bytes, |bytes| {
            products.extend(bytemuck::pod_collect_to_vec::<u8, f32>(bytes));
            Ok(())
        })?;
        spoil(&mut products);
        judge(&products, matrices, self.name())
    }
}

/// Refuses a device unless all products are right.
fn judge(products: &[f32], matrices: Matrices, device: &str) -> Result<()> {
    if products == probe_result(&PARAMS) {
        return Ok(());
    }
    let size = matrices.size();
    Err(Error::unsupported(
        format!("wgpu level matrix (wrong products of {size} × {size} matrices)"),
        device,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Level, Options};

    fn refuses(products: &[f32]) -> bool {
        [Matrices::Eight, Matrices::Sixteen].into_iter().all(|matrices| {
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

    /// 1 + left·right, with sums over the first `most` elements only.
    fn product(left: &Square, right: &Square, most: usize) -> Square {
        let sum = |row: usize, column: usize| {
            (0..most).map(|k| left[32 * row + k] * right[32 * k + column]).sum::<f32>()
        };
        (0..1024).map(|at| 1.0 + sum(at / 32, at % 32)).collect()
    }

    #[test]
    fn devices_that_multiply_wrongly_are_refused() {
        let factor = |step: u32, most: u32| -> Square {
            (0..1024).map(|at| (at * step % most) as f32).collect()
        };
        let left = factor(PARAMS.left_step, 17);
        let right = factor(PARAMS.right_step, 13);
        let both = |rows: &Square, columns: &Square| [rows.clone(), columns.clone()].concat();
        let (by_rows, by_columns) =
            (product(&left, &right, 32), product(&left, &transposed(&right), 32));
        assert_eq!(judge(&both(&by_rows, &by_columns), Matrices::Sixteen, "a device"), Ok(()));
        // both ways of loading the right operand, and each alone
        for (n, wrong) in [
            product(&transposed(&left), &right, 32),
            product(&left, &transposed(&right), 32),
            transposed(&by_rows),
            product(&left, &right, 16),
            product(&left, &right, 8),
            by_rows.iter().map(|x| x - 1.0).collect(),
            vec![0.0; 1024],
            vec![f32::NAN; 1024],
        ]
        .into_iter()
        .enumerate()
        {
            assert!(refuses(&both(&wrong, &by_columns)), "{n}");
        }
        for (n, wrong) in [
            by_rows.clone(),
            transposed(&by_columns),
            product(&left, &transposed(&right), 16),
            vec![1.0; 1024],
        ]
        .into_iter()
        .enumerate()
        {
            assert!(refuses(&both(&by_rows, &wrong)), "{n}");
        }
        // a single wrong element
        for at in [0, 17, 1023, 1024, 2047] {
            let mut products = both(&by_rows, &by_columns);
            products[at] += 1.0;
            assert!(refuses(&products), "{at}");
        }
        assert!(refuses(&by_rows));
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
        assert_eq!(gpu.probe(matrices), Ok(()));
        let refusal = gpu.probe_as(matrices, |products| products[5] = 0.0);
        assert!(matches!(
            refusal,
            Err(Error::Unsupported { what, .. }) if what.contains("wrong products")
        ));
    }
}
