//! What `scripts/scale-check` counts meanwhile.
//!
//! * Control messages of many ranks: a rank that is late, one that aborts, one that leaves. Every
//!   other rank gets the same error, also those that are not neighbours of that rank.
//! * Bytes on the links of hosts that have one for each of their ranks, on a relay, on rails and
//!   once per node. `tests/hosts/rails` makes such hosts.

use std::time::Duration;

use annulus::{Attention, Dims, Division, Layout, Plan, Route, Tensors};
use annulus_comm::{
    Deadline, all_gather, barrier,
    mpi::{Mpi, Settings},
};
use annulus_core::{Control, Error, Host, Result, Transport};
use ndarray::Array4;

use crate::{Harness, Verdict, ensure};

/// Deadline of every endpoint here. `scripts/scale-check` derives the number of heartbeats from it.
const DEADLINE: Duration = Duration::from_secs(8);
/// Delay of a late rank: long enough for several heartbeats.
const LATE: Duration = Duration::from_secs(4);

pub(crate) fn control(harness: &mut Harness, settings: &Settings) -> Verdict {
    for (name, case) in [
        ("late", late as fn(Deadline<Mpi, Host>) -> Result<Verdict>),
        ("aborted", aborted),
        ("gone", gone),
    ] {
        let endpoint =
            Mpi::world(settings.clone()).and_then(|endpoint| Deadline::new(endpoint, DEADLINE));
        let verdict = endpoint.and_then(case).unwrap_or_else(|error| Err(error.to_string()));
        harness.share(verdict.map_err(|wrong| format!("{name}: {wrong}")))?;
    }
    Ok(())
}

/// The last rank is late by half of the deadline: nothing fails.
fn late(mut endpoint: Deadline<Mpi, Host>) -> Result<Verdict> {
    barrier(&mut endpoint, 1)?;
    if endpoint.rank() + 1 == endpoint.ranks() {
        std::thread::sleep(LATE);
    }
    barrier(&mut endpoint, 2)?;
    Ok(Ok(()))
}

/// A rank aborts: all others get its abort at once, with its rank.
fn aborted(mut endpoint: Deadline<Mpi, Host>) -> Result<Verdict> {
    let origin = endpoint.ranks() / 2;
    let cause = Error::Device { what: "broke".to_owned() };
    let entered = barrier(&mut endpoint, 1);
    if endpoint.rank() == origin {
        endpoint.abort(&cause);
        return entered.map(Ok);
    }
    let want = Err(Error::Aborted { rank: origin, what: cause.to_string() });
    // the abort may overtake the last message of the first barrier
    let got = entered.and_then(|()| barrier(&mut endpoint, 2));
    Ok(ensure(got == want, || format!("got {got:?}, want {want:?}")))
}

/// The last rank leaves before a collective call: all others name it, long before the deadline.
fn gone(mut endpoint: Deadline<Mpi, Host>) -> Result<Verdict> {
    barrier(&mut endpoint, 1)?;
    let last = endpoint.ranks() - 1;
    if endpoint.rank() == last {
        return Ok(Ok(()));
    }
    let got = all_gather(&mut endpoint, 2, &[1]);
    // until every rank has the error: one that leaves earlier would itself be lost to the others
    let left = std::time::Instant::now();
    while left.elapsed() < DEADLINE / 16 {
        drop(endpoint.progress(Duration::from_millis(1)));
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(ensure(matches!(got, Err(Error::PeerLost { peer, .. }) if peer == last), || {
        format!("got {got:?}, want rank {last} lost")
    }))
}

/// Rows of a rank: 1 MiB of keys and values, far more than control messages.
const ROWS: usize = 512;
const HEADS: usize = 2;
const HEAD_DIM: usize = 128;
const PASSES: u64 = 4;

/// Environment variable with the network interface of this rank.
const LINK: &str = "ANNULUS_TEST_LINK";

pub(crate) fn links(harness: &mut Harness, settings: &Settings) -> Verdict {
    let link = std::env::var(LINK).map_err(|_| format!("{LINK} is not set"));
    harness.share(link.as_ref().map(drop).map_err(Clone::clone))?;
    let link = link?;
    let once_per_node = Route::OncePerNode { node_ranks: 0 };
    for asked in [Some(Route::RelayUp), None, Some(once_per_node)] {
        let plan = plan(harness, settings, asked).map_err(|error| error.to_string());
        harness.share(plan.as_ref().map(drop).map_err(Clone::clone))?;
        let mut plan = plan?;
        let route = plan.route();
        let x = Array4::<f32>::from_elem((1, ROWS, HEADS, HEAD_DIM), 0.5);
        let tensors = Tensors::new(x.view(), x.view(), x.view());
        let before = sent_bytes(&link);
        let mut passed = Ok(());
        for _ in 0..PASSES {
            passed = passed.and_then(|()| plan.forward(&tensors).map(drop));
        }
        harness.share(passed.map_err(|error| error.to_string()))?;
        let sent = sent_bytes(&link).and_then(|after| Ok(after - before?));
        harness.share(sent.as_ref().map(drop).map_err(Clone::clone))?;
        let all = harness.gather(&sent?.to_le_bytes())?;
        let number = |bytes: &Vec<u8>| bytes.first_chunk().map_or(0, |of| u64::from_le_bytes(*of));
        let all: Vec<u64> = all.iter().map(number).collect();
        if harness.rank() == 0 {
            println!("links {} {all:?} bytes in {PASSES} passes", route.name());
        }
        let block = (2 * ROWS * HEADS * HEAD_DIM * 4) as u64;
        harness.share(ensure(is_expected(route, &all, block), || format!("{route:?}: {all:?}")))?;
    }
    Ok(())
}

/// Plans full attention: every block passes all ranks.
fn plan(harness: &Harness, settings: &Settings, route: Option<Route>) -> Result<Plan> {
    let dims = Dims::new(1, ROWS * harness.ranks(), HEADS, HEAD_DIM);
    let attention = Attention::new().forward_only(true);
    let division = Division::new().layout(Layout::Contiguous).route(route);
    Plan::new((attention, division), dims, Mpi::world(settings.clone())?)
}

/// Returns true if the links carry the blocks of the route, within 10 % for headers and control
/// messages. Blocks that leave a rank over its link:
///
/// * rails, once per node: nodes − 1;
/// * relay: ranks − 1 from the last rank of each node, 0 from others.
fn is_expected(route: Route, all: &[u64], block: u64) -> bool {
    let near = |bytes: u64, blocks: usize| {
        let want = PASSES * block * blocks as u64;
        bytes >= want && bytes <= want + (PASSES * block) / 10 * (1 + blocks as u64)
    };
    match route {
        Route::RailsUp { node_ranks } | Route::OncePerNode { node_ranks } => {
            all.iter().all(|&bytes| near(bytes, all.len() / node_ranks - 1))
        }
        Route::RelayUp => {
            all.iter().filter(|&&bytes| near(bytes, all.len() - 1)).count() >= 2
                && all.iter().any(|&bytes| near(bytes, 0))
        }
        _ => false,
    }
}

/// Returns the bytes that this host has sent over `link`.
fn sent_bytes(link: &str) -> std::result::Result<u64, String> {
    let table = std::fs::read_to_string("/proc/net/dev").map_err(|error| error.to_string())?;
    let line = table.lines().find_map(|line| line.trim().strip_prefix(&format!("{link}:")));
    // received bytes and seven more numbers come first
    let sent = line.and_then(|line| line.split_whitespace().nth(8)?.parse().ok());
    sent.ok_or_else(|| format!("no interface {link} in /proc/net/dev"))
}
