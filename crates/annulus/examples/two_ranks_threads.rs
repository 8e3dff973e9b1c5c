//! The body of one rank, as a process of a parallel program runs it: each rank has its own rows
//! only. Here the two ranks are threads; `mpi.rs` has the same body in processes.
//!
//! ```sh
//! cargo run --release -p annulus --example two_ranks_threads
//! ```

use annulus::{
    Attention, Dims, Division, Layout, Plan, Result, Setup, Tensors,
    comm::threads::{Threads, each_rank, ring},
    ndarray::Array4,
};

fn rank(transport: Threads) -> Result<()> {
    let dims = Dims::new(1, 512, 4, 32); // of the whole sequence, the same on every rank
    let attention =
        Setup::from((Attention::new().causal(true), Division::new().layout(Layout::Zigzag)));
    let mut plan = Plan::new(&attention, dims, transport)?;

    // the rows that the layout assigns to this rank, in the order of its tensors
    let rows: Vec<i64> = plan.q_rows().iter().collect();
    let x = Array4::<f32>::from_shape_fn((1, rows.len(), 4, 32), |(_, i, h, c)| {
        (0.3 * (rows[i] * 31 + (h * 7 + c) as i64) as f32).sin()
    });
    let tensors = Tensors::new(x.view(), x.view(), x.view());

    // of these queries, over the keys of both ranks
    let forward = plan.forward(&tensors)?;
    // of these queries, and of these keys by the queries of both ranks
    let gradients = plan.backward(&tensors, &forward, x.view(), None)?;
    println!(
        "rank {} of {}: rows {}..={}, lse of the first {}, dk {:?}",
        plan.rank(),
        plan.ranks(),
        rows[0],
        rows[rows.len() - 1],
        forward.lse[[0, 0, 0]],
        gradients.dk.dim()
    );
    Ok(())
}

fn main() -> Result<()> {
    each_rank(ring(2), |_, transport| rank(transport))?;
    Ok(())
}
