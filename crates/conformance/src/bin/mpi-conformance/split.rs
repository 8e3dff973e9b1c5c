//! A communicator from a host's split: Open MPI keeps `MPI_TAG_UB` on the world and its duplicates
//! only, and the ring must still find it.

use std::time::Duration;

use annulus::{Attention, Dims, Division, Layout, Plan, Runtime, Setup, Tensors};
use annulus_comm::mpi::{Mpi, Settings};
use annulus_core::{Error, Result, index};
use annulus_mpi::rsmpi::{
    self as mpi,
    topology::{Color, Communicator},
    traits::AsRaw,
};
use ndarray::Array4;

use crate::harness::{Verdict, ensure};

const DIMS: Dims =
    Dims { batch: 1, q_len: 20, kv_len: 20, q_heads: 2, kv_heads: 1, head_dim: 4, value_dim: 4 };

pub(crate) fn host_split(settings: &Settings) -> Verdict {
    let universe = mpi::initialize().ok_or("MPI was initialised already")?;
    let world = universe.world();
    let verdict = split(settings, &world);
    if verdict.is_ok() && world.rank() == 0 {
        println!("ok: host-split on {} ranks", world.size());
    }
    verdict
}

#[expect(unsafe_code, reason = "the handle of a live communicator")]
fn split(settings: &Settings, world: &impl Communicator) -> Verdict {
    let text = |error: Error| error.to_string();
    let all = Mpi::world(settings.clone()).map_err(text)?;
    let part =
        world.split_by_color(Color::with_value(world.rank() % 2)).ok_or("no part of the world")?;
    // SAFETY: the communicator is live, and of the MPI that this program is linked with
    let part = unsafe { Mpi::over_communicator(part.as_raw(), settings.clone()) }.map_err(text)?;
    // more than MPI guarantees: with equal limits this test would prove nothing
    ensure(all.last_tag() > 32_767, || format!("the world's tags end at {}", all.last_tag()))?;
    ensure(part.last_tag() == all.last_tag(), || {
        format!(
            "tags of a part end at {}, those of the world at {}",
            part.last_tag(),
            all.last_tag()
        )
    })?;
    drop(all);
    pass(part).map_err(text)
}

/// Runs forward with all values 0.5: whatever the weights, every output is 0.5.
fn pass(transport: Mpi) -> Result<()> {
    let attention = Setup::from((
        Attention::new().causal(true),
        Division::new().layout(Layout::Zigzag),
        Runtime::new().deadline(Duration::from_secs(20)),
    ));
    let mut plan = Plan::new(&attention, DIMS, transport)?;
    let tensor = |heads| Array4::<f32>::from_elem((1, index(plan.q_rows().len()), heads, 4), 0.5);
    let q = tensor(2);
    let kv = tensor(1);
    let forward = plan.forward(&Tensors::new(q.view(), kv.view(), kv.view()))?;
    match forward.out.iter().find(|&&out| (out - 0.5).abs() > 1e-6) {
        Some(out) => Err(Error::Device { what: format!("a weighted mean of 0.5 is {out}") }),
        None => Ok(()),
    }
}
