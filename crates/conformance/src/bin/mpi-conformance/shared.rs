//! Plans over one endpoint: interleaved calls, drops in any order, and the fate of the others when
//! one fails.

use std::{thread, time::Duration};

use annulus::{Attention, Dims, Division, Layout, Plan, Runtime, Setup, Tensors};
use annulus_comm::{
    barrier,
    mpi::{Mpi, Settings},
};
use annulus_core::{
    Channel, Control, Error, Host, HostBuffer, Incoming, MessageHeader, Result, Transport,
};

use crate::{Bits, Harness, Verdict, bits, ensure, tensors};

const DIMS: Dims =
    Dims { batch: 1, q_len: 56, kv_len: 56, q_heads: 2, kv_heads: 1, head_dim: 4, value_dim: 4 };
const DEADLINE: Duration = Duration::from_secs(20);

pub(crate) fn all(harness: &mut Harness, settings: &Settings) -> Verdict {
    for (name, case) in [
        ("interleaved", interleaved as fn(&Harness, &Settings) -> Result<Verdict>),
        ("dropped in any order", dropped_in_any_order),
        ("many in turn", many_in_turn),
        ("refused", refused),
        ("lost", lost),
        ("aborted", aborted),
        ("dropped within a call", dropped_within_a_call),
        ("more than there are tags for", more_than_tags),
    ] {
        let verdict = case(harness, settings).unwrap_or_else(|error| Err(error.to_string()));
        harness.share(verdict.map_err(|wrong| format!("{name}: {wrong}")))?;
    }
    Ok(())
}

/// Two attentions with different masks, layouts and messages.
fn attentions() -> [Setup; 2] {
    let of = |attention: Attention, layout| {
        let runtime = Runtime::new().deadline(DEADLINE);
        Setup::from((attention, Division::new().layout(layout), runtime))
    };
    [of(Attention::new().causal(true), Layout::Zigzag), of(Attention::new(), Layout::Contiguous)]
}

fn plan(setup: &Setup, transport: Mpi) -> Result<Plan> {
    Plan::new(setup, DIMS, transport)
}

/// Plans of both attentions over one endpoint, and the endpoint.
fn two(settings: &Settings) -> Result<(Mpi, [Plan; 2])> {
    let endpoint = Mpi::world(settings.clone())?;
    let [first, second] = attentions();
    let first = plan(&first, endpoint.share()?)?;
    let second = plan(&second, endpoint.share()?)?;
    Ok((endpoint, [first, second]))
}

/// Bits of both attentions over endpoints of their own.
fn separate(settings: &Settings) -> Result<[Bits; 2]> {
    let [first, second] = attentions();
    let of = |setup: &Setup| bits(&mut plan(setup, Mpi::world(settings.clone())?)?);
    Ok([of(&first)?, of(&second)?])
}

/// Passes of two plans, in turn and, where MPI allows it, at the same time, begun in another order
/// on every other rank: the bits of plans with endpoints of their own.
fn interleaved(harness: &Harness, settings: &Settings) -> Result<Verdict> {
    let want = separate(settings)?;
    let (endpoint, mut plans) = two(settings)?;
    for turn in 0..2 {
        for number in [0, 1] {
            if bits(&mut plans[number])? != want[number] {
                return Ok(Err(format!("plan {number} has other bits in turn {turn}")));
            }
        }
    }
    if !endpoint.any_thread() {
        return Ok(Ok(()));
    }
    let begun_first = harness.rank() % 2;
    let started = |number: usize, plan: &mut Plan| {
        if number != begun_first {
            thread::sleep(Duration::from_millis(20));
        }
        bits(plan)
    };
    let [first, second] = &mut plans;
    let got = thread::scope(|scope| {
        let first = scope.spawn(|| started(0, first));
        let second = scope.spawn(|| started(1, second));
        [first, second].map(|pass| pass.join().unwrap_or_else(|_| Err(panicked())))
    });
    for (number, got) in got.into_iter().enumerate() {
        if got? != want[number] {
            return Ok(Err(format!("plan {number} has other bits beside the other one")));
        }
    }
    Ok(Ok(()))
}

fn panicked() -> Error {
    Error::Device { what: "a thread panicked".to_owned() }
}

/// Each rank drops its plans in an order of its own, and uses one after it has dropped the other.
fn dropped_in_any_order(harness: &Harness, settings: &Settings) -> Result<Verdict> {
    let want = separate(settings)?;
    let (endpoint, [first, mut second]) = two(settings)?;
    let early = harness.rank().is_multiple_of(2);
    let first = if early {
        drop(first);
        None
    } else {
        Some(first)
    };
    let second_bits = bits(&mut second)?;
    drop(first);
    let mut third = plan(&attentions()[0], endpoint.share()?)?;
    // the first handle may be dropped before the others
    drop(endpoint);
    let third_bits = bits(&mut third)?;
    if early {
        drop((third, second));
    } else {
        drop((second, third));
    }
    Ok(ensure(second_bits == want[1] && third_bits == want[0], || "other bits".to_owned()))
}

/// Many handles one after another, which `scripts/scale-check` finds to cost no communicators.
fn many_in_turn(_: &Harness, settings: &Settings) -> Result<Verdict> {
    let endpoint = Mpi::world(settings.clone())?;
    for _ in 0..150 {
        let mut shared = endpoint.share()?;
        shared.heartbeat(true);
        barrier::<Host>(&mut shared, 1)?;
    }
    Ok(Ok(()))
}

/// A call of one plan that is refused changes nothing for either.
fn refused(harness: &Harness, settings: &Settings) -> Result<Verdict> {
    let (_endpoint, [mut first, mut second]) = two(settings)?;
    let want = [bits(&mut first)?, bits(&mut second)?];
    let [q, kv] = tensors(&first);
    let own = harness.rank() == 0;
    let kv_of_call = if own { q.view() } else { kv.view() };
    let got = first.forward(&Tensors::new(q.view(), kv_of_call, kv.view())).map(drop);
    let as_expected = match &got {
        Err(Error::InvalidArgument { .. }) => own,
        Err(Error::Refused { rank: 0, .. }) => !own,
        _ => false,
    };
    let [second, first] = [bits(&mut second)?, bits(&mut first)?];
    Ok(ensure(as_expected && [first, second] == want, || format!("{got:?}, or other bits")))
}

/// Returns an error unless both plans and further handles return an error that `is_expected`
/// selects.
fn ends_all(endpoint: &Mpi, plans: &mut [Plan], is_expected: impl Fn(&Error) -> bool) -> Verdict {
    for plan in plans {
        match bits(plan) {
            Err(Error::Poisoned { .. }) => {}
            Err(error) if is_expected(&error) => {}
            other => return Err(format!("{other:?}")),
        }
    }
    match endpoint.share() {
        Err(error) if is_expected(&error) => Ok(()),
        other => Err(format!("{other:?} for a further handle")),
    }
}

/// The last rank drops a plan which the others call: it is lost to them, and with it both plans.
fn lost(harness: &Harness, settings: &Settings) -> Result<Verdict> {
    let (endpoint, [mut first, second]) = two(settings)?;
    let last = harness.ranks() - 1;
    if last == 0 {
        return Ok(Ok(()));
    }
    if harness.rank() == last {
        drop(first);
        let is_expected =
            |error: &Error| matches!(error, Error::PeerLost { .. } | Error::Aborted { .. });
        return Ok(ends_all(&endpoint, &mut [second], is_expected));
    }
    let got = bits(&mut first).map(drop);
    // the first rank that finds it aborts
    let is_lost = |error: &Error| match error {
        Error::PeerLost { peer, .. } => *peer == last,
        Error::Aborted { what, .. } => what.contains(&format!("rank {last}")),
        _ => false,
    };
    if !got.as_ref().is_err_and(is_lost) {
        return Ok(Err(format!("{got:?}, want rank {last} lost")));
    }
    Ok(ends_all(&endpoint, &mut [first, second], is_lost))
}

/// An abort through one handle ends all of them on all ranks, and a plan with another endpoint not.
fn aborted(harness: &Harness, settings: &Settings) -> Result<Verdict> {
    let mut beside = Mpi::world(settings.clone())?;
    let (endpoint, mut plans) = two(settings)?;
    let cause = Error::Device { what: "broke".to_owned() };
    // until all ranks have both plans
    barrier::<Host>(&mut beside, 1)?;
    if harness.rank() == 0 {
        endpoint.share()?.abort(&cause);
    }
    let is_expected =
        |error: &Error| matches!(error, Error::Aborted { rank: 0, .. }) || *error == cause;
    let verdict = ends_all(&endpoint, &mut plans, is_expected);
    bits(&mut plan(&attentions()[1], beside.share()?)?)?;
    Ok(verdict)
}

/// A rank drops a handle with a receive in flight: all ranks get its abort.
fn dropped_within_a_call(harness: &Harness, settings: &Settings) -> Result<Verdict> {
    let endpoint = Mpi::world(settings.clone())?;
    let mut other_endpoint = Mpi::world(settings.clone())?;
    let mut within = endpoint.share()?;
    let mut beside = endpoint.share()?;
    barrier::<Host>(&mut other_endpoint, 1)?;
    let ranks = harness.ranks();
    if harness.rank() == 0 {
        let ranges = std::iter::once(0..8).collect();
        let peer = ranks - 1;
        let channel = Channel::Kv;
        let header = MessageHeader { peer, channel, tag: 1, step: 3, ranges, agreed: None };
        let buffer = HostBuffer::zeroed(8)?;
        within.post(&[], &mut vec![Incoming { header, buffer }])?;
    }
    drop(within);
    let got = barrier::<Host>(&mut beside, 1);
    let what = "a plan that shares this endpoint was dropped within a call";
    let is_expected = match &got {
        Err(Error::Comm { peer: 0, step: 3, what: text }) => harness.rank() == 0 && text == what,
        Err(Error::Aborted { rank: 0, what: text }) => text.contains(what),
        _ => false,
    };
    Ok(ensure(is_expected, || format!("{got:?}")))
}

/// Plans that have no tags of their own, on one rank at least, announce their messages: the same
/// bits.
fn more_than_tags(harness: &Harness, settings: &Settings) -> Result<Verdict> {
    let want = separate(settings)?;
    let endpoint = Mpi::world(settings.clone())?;
    let mut handles = (0..65).map(|_| endpoint.share()).collect::<Result<Vec<Mpi>>>()?;
    let posts_ahead = |handle: &Mpi| Transport::<Host>::posts_ahead(handle);
    let ahead = handles.iter().filter(|handle| posts_ahead(handle)).count();
    // the 64th has the tags of the first handle
    if settings.announce && ahead > 0 || !settings.announce && posts_ahead(&handles[63]) {
        return Ok(Err(format!("{ahead} handles post ahead")));
    }
    // on rank 0 alone the next one has tags: the ranks agree to announce
    if harness.rank() == 0 {
        handles.remove(1);
    }
    let next = endpoint.share()?;
    let mut plans = [plan(&attentions()[0], endpoint)?, plan(&attentions()[1], next)?];
    for number in [1, 0] {
        if bits(&mut plans[number])? != want[number] {
            return Ok(Err(format!("plan {number} has other bits")));
        }
    }
    Ok(Ok(()))
}
