//! Agreement: all ranks derive the same verdict.

use annulus_comm::{Descriptor, agree, barrier, close};
use annulus_core::{Control, Error, Result};

use crate::*;

/// Returns the result of one agreement on every rank of a ring.
fn verdicts(ranks: usize, local: fn(usize) -> Result<Descriptor>) -> Vec<Result<Vec<u64>>> {
    on_threads(ranks, move |mut endpoint| {
        let local = local(endpoint.rank());
        agree(&mut endpoint, 5, local)
    })
}

#[test]
fn the_first_field_and_the_lowest_rank_are_named_on_all_ranks() {
    let local = |rank: usize| {
        let scale = if rank == 4 { "0.5" } else { "0.25" };
        let descriptor = Descriptor::new().field("q_len", if rank == 3 { 65 } else { 64 });
        Ok(descriptor.field("kv_len", if rank == 1 { 7 } else { 8 }).field_as(
            "scale",
            scale.len() as u64,
            scale,
        ))
    };
    let mismatch = Error::RankMismatch {
        field: "q_len".into(),
        rank: 3,
        got: "65".into(),
        rank0: "64".into(),
    };
    assert_eq!(verdicts(5, local), vec![Err(mismatch); 5]);
    let local = |rank: usize| {
        Ok(Descriptor::new().field_as(
            "scale",
            2 + rank as u64 / 2,
            ["half", "half", "third", "third"][rank],
        ))
    };
    let mismatch = Error::RankMismatch {
        field: "scale".into(),
        rank: 2,
        got: "third".into(),
        rank0: "half".into(),
    };
    assert_eq!(verdicts(4, local), vec![Err(mismatch); 4]);
}

#[test]
fn other_fields_are_a_mismatch_too() {
    let local = |rank: usize| {
        Ok(if rank == 1 {
            Descriptor::new().field("a", 1)
        } else {
            Descriptor::new().field("b", 1)
        })
    };
    for verdict in verdicts(3, local) {
        let Err(Error::RankMismatch { field, rank: 1, .. }) = verdict else {
            panic!("{verdict:?}")
        };
        assert_eq!(field, "set of fields");
    }
}

#[test]
fn a_rank_keeps_its_own_refusal_and_the_others_name_it() {
    fn refusal(rank: usize) -> Error {
        Error::invalid("softmax_scale", format!("NaN on rank {rank}"), "a finite number")
    }
    let local = |rank: usize| match rank {
        2 | 3 => Err(refusal(rank)),
        _ => Ok(Descriptor::new().field("rank", rank as u64)),
    };
    for (rank, verdict) in verdicts(5, local).into_iter().enumerate() {
        let named = Error::Refused { rank: 2, what: refusal(2).to_string() };
        assert_eq!(verdict, Err(if rank == 2 || rank == 3 { refusal(rank) } else { named }));
    }
}

#[test]
fn a_close_returns_the_failure_of_any_rank_on_all_ranks() {
    let outcomes = |failure: Option<Error>| {
        on_threads(4, move |mut endpoint| {
            barrier(&mut endpoint, 1).unwrap();
            let mine =
                if endpoint.rank() == 2 { failure.clone().map_or(Ok(()), Err) } else { Ok(()) };
            close(&mut endpoint, 2, mine)
        })
    };
    assert_eq!(outcomes(None), vec![Ok(()); 4]);
    let dead = Error::Device { what: "hot".into() };
    let refused = Error::out_of_memory("dbias", 5);
    let aborted = Error::Aborted { rank: 2, what: dead.to_string() };
    let full = Error::Refused { rank: 2, what: refused.to_string() };
    assert_eq!(
        outcomes(Some(dead.clone())),
        [Err(aborted.clone()), Err(aborted.clone()), Err(dead), Err(aborted)]
    );
    assert_eq!(
        outcomes(Some(refused.clone())),
        [Err(full.clone()), Err(full.clone()), Err(refused), Err(full)]
    );
}
