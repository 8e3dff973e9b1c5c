//! One rank of an MPI program: every process has its own rows only. annulus duplicates the
//! communicator, so that its messages are never matched with the program's.
//!
//! ```sh
//! cargo build --release -p annulus --features mpi --example mpi
//! mpirun -n 2 target/release/examples/mpi
//! ```

use annulus::{
    Attention, Dims, Plan, Result, Tensors,
    comm::mpi::{Launch, Mpi, Settings},
    ndarray::Array4,
};

fn main() -> Result<()> {
    let _launch = Launch::begin()?; // MPI_Init, unless the program has; MPI_Finalize when dropped
    let transport = Mpi::world(Settings::default())?;
    let dims = Dims::new(1, 512, 4, 32); // of the whole sequence, the same on every rank
    let mut plan = Plan::new(Attention::new().causal(true), dims, transport)?;

    let rows: Vec<i64> = plan.q_rows().iter().collect();
    let x = Array4::<f32>::from_shape_fn((1, rows.len(), 4, 32), |(_, i, h, c)| {
        (0.3 * (rows[i] * 31 + (h * 7 + c) as i64) as f32).sin()
    });
    let tensors = Tensors::new(x.view(), x.view(), x.view());
    let forward = plan.forward(&tensors)?;
    let gradients = plan.backward(&tensors, &forward, x.view(), None)?;
    println!(
        "rank {} of {}: {} rows, lse of the first {}, dk {:?}",
        plan.rank(),
        plan.ranks(),
        rows.len(),
        forward.lse[[0, 0, 0]],
        gradients.dk.dim()
    );
    Ok(())
}
