//! Creation of a cache: checks its definition and agrees on it with all ranks.

use std::time::Duration;

use annulus_core::{Backend, Capabilities, Dims, Error, Host, Result, Spec, Strategy, Transport};

use super::page_tree;
use crate::{
    agreement,
    ring::{
        RingOptions, check,
        describe::{self, Combined, TransportFields},
    },
};

/// Agrees with all ranks on a cache. Returns the spec, and true if all transports post ahead.
pub(super) fn agree<B: Backend>(
    backend: &B,
    transport: &mut dyn Transport<Host>,
    spec: Result<Spec>,
    page_rows: u64,
    deadline_variable: Option<Duration>,
) -> Result<(Spec, bool)> {
    let checked = spec.and_then(|spec| check_spec(backend, spec, page_rows));
    let placement = transport.control().placement().cloned();
    let options = RingOptions { deadline_variable, ..RingOptions::default() };
    let posts_ahead = transport.posts_ahead();
    let groups_in_order = transport.runs_groups_in_order();
    let described = checked.as_ref().map_err(Error::clone).map(|(spec, capabilities)| {
        let fields =
            TransportFields { placement: placement.as_ref(), posts_ahead, groups_in_order };
        describe::plan(spec, &options, Strategy::Ring, capabilities, fields)
            .field("page_rows", page_rows)
    });
    let combined = agreement::enter(transport, 0, &described)?;
    let (spec, _) = checked?;
    Ok((spec, Combined::new(&combined)?.posts_ahead))
}

/// Checks the definition of a cache.
fn check_spec<B: Backend>(backend: &B, spec: Spec, page_rows: u64) -> Result<(Spec, Capabilities)> {
    let spec = Spec { dims: Dims { q_len: 1, kv_len: 1, ..spec.dims }, ..spec };
    let refusals =
        [(spec.bias.is_some(), "a bias tensor"), (!spec.normalize, "unnormalised output")];
    if let Some((_, what)) = refusals.into_iter().find(|(refused, _)| *refused) {
        return Err(Error::unsupported(what, "the KV cache"));
    }
    spec.validate()?;
    // a segment, the unit of allocation, is at least a page
    if !(1..=1 << 32).contains(&page_rows) {
        return Err(Error::invalid("page_rows", page_rows, "1 to 2^32"));
    }
    let capabilities = backend.capabilities(&spec)?;
    check::reproducible(&spec, &capabilities)?;
    if let Some(rows) = spec.leaf_rows {
        // a page is then a node of the tree over leaves
        if !page_rows.is_multiple_of(rows) || !(page_rows / rows).is_power_of_two() {
            let want = format!("{rows} times a power of two in the reproducible order");
            return Err(Error::invalid("page_rows", page_rows, want));
        }
        backend.capabilities(&page_tree::page_spec(&spec))?;
        backend.capabilities(&page_tree::tree_spec(&spec, 1)?)?;
    }
    Ok((spec, capabilities))
}
