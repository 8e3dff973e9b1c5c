//! A known product of matrices, computed before a device may compute at [`crate::Level::Matrix`]: neither wgpu's translation nor drivers have proved
//! themselves here on all hardware, and 16 × 16 could not be run anywhere when this was written. The kernel is `kernels/matrix_probe.wgsl`.

use annulus_core::{Error, Result};

use crate::{
    Gpu,
    kernels::{
        Variant,
        matrices::{PROBE_NUMBERS, probe_result},
        numbers::ProbeNumbers,
    },
    launch::{Arena, Bound, Job},
    level::Matrices,
    memory::USAGE,
};

/// Factors that no mistake of an order leaves the same.
const NUMBERS: ProbeNumbers = ProbeNumbers { left_step: 7, right_step: 5 };

impl Gpu {
    /// Multiplies on the device, in every way in which the kernels do.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if a product is wrong.
    pub(crate) fn probe(&self, matrices: Matrices) -> Result<()> {
        self.probe_as(matrices, |_| {})
    }

    /// `spoil` changes what the device has computed.
    fn probe_as(&self, matrices: Matrices, spoil: impl FnOnce(&mut [f32])) -> Result<()> {
        let mut arena = Arena::default();
        let bytes = 4 * PROBE_NUMBERS as u64;
        let result = self.create_buffer("probe", bytes, USAGE)?;
        let mut job = Job::new(self, &mut arena);
        job.launch(Variant::MatrixProbe(matrices), 1, vec![Bound::whole(&result)], |_| NUMBERS)?;
        job.submit()?;
        let mut products = bytemuck::pod_collect_to_vec::<u8, f32>(&self.read(&result, bytes)?);
        spoil(&mut products);
        judge(&products, matrices, self.name())
    }
}

/// Refuses a device that has computed `products`, unless all of them are right.
fn judge(products: &[f32], matrices: Matrices, device: &str) -> Result<()> {
    if products == probe_result(&NUMBERS) {
        return Ok(());
    }
    let size = matrices.size();
    Err(Error::unsupported(format!("wgpu level matrix, for its products of {size} × {size} matrices are wrong,"), device))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Level, Options};

    fn refuses(products: &[f32]) -> bool {
        [Matrices::Eight, Matrices::Sixteen].into_iter().all(|matrices| {
            let told = judge(products, matrices, "a device");
            matches!(told, Err(Error::Unsupported { what, by }) if what.contains(&format!("{0} × {0}", matrices.size())) && by == "a device")
        })
    }

    /// 32 × 32 numbers, row by row.
    type Square = Vec<f32>;

    fn transposed(of: &Square) -> Square {
        (0..1024).map(|at| of[32 * (at % 32) + at / 32]).collect()
    }

    /// 1 + left·right, with sums only up to `most`.
    fn product(left: &Square, right: &Square, most: usize) -> Square {
        let sum = |row: usize, column: usize| (0..most).map(|k| left[32 * row + k] * right[32 * k + column]).sum::<f32>();
        (0..1024).map(|at| 1.0 + sum(at / 32, at % 32)).collect()
    }

    #[test]
    fn devices_that_multiply_wrongly_are_refused() {
        let factor = |step: u32, most: u32| -> Square { (0..1024).map(|at| (at * step % most) as f32).collect() };
        let (left, right) = (factor(NUMBERS.left_step, 17), factor(NUMBERS.right_step, 13));
        let both = |rows: &Square, columns: &Square| [rows.clone(), columns.clone()].concat();
        let (by_rows, by_columns) = (product(&left, &right, 32), product(&left, &transposed(&right), 32));
        assert_eq!(judge(&both(&by_rows, &by_columns), Matrices::Sixteen, "a device"), Ok(()));
        // either way of loading the right factor, and each alone
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
        for (n, wrong) in
            [by_rows.clone(), transposed(&by_columns), product(&left, &transposed(&right), 16), vec![1.0; 1024]].into_iter().enumerate()
        {
            assert!(refuses(&both(&by_rows, &wrong)), "{n}");
        }
        // one number of one matrix
        for at in [0, 17, 1023, 1024, 2047] {
            let mut products = both(&by_rows, &by_columns);
            products[at] += 1.0;
            assert!(refuses(&products), "{at}");
        }
        assert!(refuses(&by_rows));
    }

    #[test]
    fn a_device_whose_product_is_spoilt_is_refused() {
        let options = Options { level: Some(Level::Matrix), ..Options::default() };
        let can = Gpu::list().first().is_some_and(|adapter| adapter.levels.contains(&Level::Matrix));
        if !can {
            let required = std::env::var("ANNULUS_REQUIRE").is_ok_and(|words| words.split(',').any(|word| word == "matrix"));
            assert!(!required, "ANNULUS_REQUIRE has matrix, and the first adapter has none");
            eprintln!("NOT RUN: no cooperative matrices");
            return;
        }
        let gpu = Gpu::open(&options).unwrap();
        let matrices = gpu.matrices().unwrap();
        assert_eq!(gpu.probe(matrices), Ok(()));
        let told = gpu.probe_as(matrices, |products| products[5] = 0.0);
        assert!(matches!(told, Err(Error::Unsupported { what, .. }) if what.contains("are wrong")));
    }
}
