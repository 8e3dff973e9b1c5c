//! Backward in two passes: keys and values travel for dq, then the queries for dk and dv. No sum crosses the ring.

use annulus_core::{Backend, Inputs, Result, Saved, Space};

use super::{Report, Ring, blocks::Blocks, buffers::spare, flight::Flight, legs::Leg, parts};

impl<B: Backend> Ring<B> {
    pub(super) fn two_passes(
        &mut self,
        inputs: &Inputs<'_, B::Space>,
        saved: &Saved<'_, B::Space>,
        home: &mut <B::Space as Space>::Buffer,
        first_tag: u64,
    ) -> Result<Report> {
        let first = self.travelling_keys(inputs, saved, home, first_tag)?;
        let second = self.travelling_queries(inputs, saved, home, first_tag + parts::tags(self.ranks))?;
        Ok(Report {
            waiting_seconds: first.waiting_seconds + second.waiting_seconds,
            bytes_predicted: first.bytes_predicted + second.bytes_predicted,
            ..first
        })
    }

    /// dq of this rank, and what its own queries give to its own dk and dv.
    fn travelling_keys(
        &mut self,
        inputs: &Inputs<'_, B::Space>,
        saved: &Saved<'_, B::Space>,
        home: &mut <B::Space as Space>::Buffer,
        first_tag: u64,
    ) -> Result<Report> {
        let Self { backend, workspace, transport, shared, buffers, route, spec, local, .. } = self;
        let mut own = spare::<B::Space>(&mut buffers.blocks, local.keys.len() as u64 * spec.kv_record().bytes())?;
        let packed = backend.pack(workspace, inputs, &mut own)?;
        let blocks = Blocks::new(own, packed, *route, &mut buffers.blocks);
        let mut flight = Flight::new(transport.as_mut(), first_tag);
        parts::visit(&shared.way.legs, &shared.coordinates.kv, blocks, &mut flight, &mut buffers.rows, |step, block, tick| {
            backend.attend_queries(workspace, inputs, saved, block, &mut *tick)?;
            // a kernel that was stopped leaves nothing to go on with
            if step > 0 || tick().is_break() {
                return Ok(());
            }
            backend.attend_keys(workspace, inputs, saved, block, home, tick).map(drop)
        })?;
        Ok(report(&flight, &shared.way.legs))
    }

    /// dk, dv of this rank from the queries of all others.
    fn travelling_queries(
        &mut self,
        inputs: &Inputs<'_, B::Space>,
        saved: &Saved<'_, B::Space>,
        home: &mut <B::Space as Space>::Buffer,
        first_tag: u64,
    ) -> Result<Report> {
        let Self { backend, workspace, transport, shared, buffers, route, spec, local, .. } = self;
        let mut own = spare::<B::Space>(&mut buffers.queries, local.queries.len() as u64 * spec.query_record().bytes())?;
        let packed = backend.pack_queries(workspace, inputs, saved, &mut own)?;
        let blocks = Blocks::new(own, packed, *route, &mut buffers.queries);
        let mut flight = Flight::new(transport.as_mut(), first_tag);
        parts::visit(&shared.query_legs, &shared.coordinates.q, blocks, &mut flight, &mut buffers.rows, |step, block, tick| {
            // this rank's own queries have given their part in the first pass
            if step == 0 { Ok(()) } else { backend.attend_keys_home(workspace, inputs, block, home, tick) }
        })?;
        Ok(report(&flight, &shared.query_legs))
    }
}

fn report<S: Space>(flight: &Flight<'_, S>, legs: &[Leg]) -> Report {
    let bytes_predicted = legs.iter().map(|leg| leg.before.bytes_sent()).sum();
    Report { waiting_seconds: flight.waited.as_secs_f64(), bytes_predicted, ..Report::default() }
}
