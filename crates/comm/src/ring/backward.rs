//! Backward: keys and values travel again, and their gradients one step behind (one pass), or the queries after them (`two_pass.rs`).

use annulus_core::{Backend, BackwardMode, Block, Channel, Error, Gradients, Hop, Inputs, Result, RowSet, Saved, Space};

use super::{Report, Ring, blocks::Blocks, buffers::spare, flight::Flight, legs::Leg, split::Homecoming};

impl<B: Backend> Ring<B> {
    pub(super) fn backward_pass(
        &mut self,
        inputs: &Inputs<'_, B::Space>,
        saved: &Saved<'_, B::Space>,
        gradients: &mut Gradients<'_, B::Space>,
        first_tag: u64,
    ) -> Result<Report> {
        self.backend.begin_backward(&mut self.workspace, inputs, saved)?;
        let mut home = self.buffers.home.take().ok_or_else(|| Error::Device { what: "the plan has no gradient buffer".into() })?;
        let report = if self.spec.backward == BackwardMode::TwoPass && self.ranks > 1 {
            self.two_passes(inputs, saved, &mut home, first_tag)?
        } else {
            self.one_pass(inputs, saved, &mut home, first_tag)?
        };
        self.backend.finish_backward(&mut self.workspace, inputs, &home, gradients)?;
        self.buffers.home = Some(home);
        Ok(report)
    }

    /// dq of this rank, and dk, dv of its own block and of every block that comes by; some of the own block last.
    fn one_pass(
        &mut self,
        inputs: &Inputs<'_, B::Space>,
        saved: &Saved<'_, B::Space>,
        home: &mut <B::Space as Space>::Buffer,
        first_tag: u64,
    ) -> Result<Report> {
        let Self { backend, workspace, transport, shared, buffers, route, spec, local, place, ranks, .. } = self;
        let mut own = spare::<B::Space>(&mut buffers.blocks, local.keys.len() as u64 * spec.kv_record().bytes())?;
        let packed = match ranks {
            1 => backend.pack_alone(workspace, inputs, &mut own)?,
            _ => backend.pack(workspace, inputs, &mut own)?,
        };
        let mut blocks = Blocks::new(own, packed, *route, &mut buffers.blocks);
        let mut sums = Sums::<B::Space> { stock: &mut buffers.gradients, homecomings: &mut buffers.homecomings, sent: None };
        let mut flight = Flight::new(transport.as_mut(), first_tag);
        // homecomings posted after the step before, in the order of their messages
        let mut coming_home: &[Homecoming] = &[];
        for (step, leg) in shared.way.legs.iter().enumerate() {
            blocks.post_next(&leg.before, &mut flight)?;
            let mut fresh = None;
            if let Some((buffer, ready)) = blocks.here() {
                let early = RowSet::all(shared.way.early);
                shared.coordinates.kv[leg.owner].expand(if step == 0 { &early } else { &leg.rows }, &mut buffers.rows);
                let block = Block { buffer, ready, rows: &buffers.rows };
                if step == 0 {
                    backend.attend_backward(workspace, inputs, saved, &block, home, &mut || flight.tick())?;
                } else {
                    let mut sum = spare::<B::Space>(sums.stock, leg.rows.count() * spec.gradient_record().bytes())?;
                    let ready = backend.attend_backward(workspace, inputs, saved, &block, &mut sum, &mut || flight.tick())?;
                    fresh = Some((sum, ready));
                }
            }
            let landed = flight.land()?;
            sums.recycle();
            let mut homecomings = coming_home.iter();
            for (hop, arrived) in landed {
                match (hop.channel, homecomings.as_slice().first(), &mut fresh) {
                    (Channel::Block, ..) => blocks.arrive(arrived),
                    (Channel::Travel, _, Some((sum, ready))) => {
                        *ready = backend.combine(workspace, sum, &arrived.buffer, &arrived.ready, &leg.travelled, true)?;
                        sums.stock.push(arrived.buffer);
                    }
                    (Channel::Home, Some(homecoming), _) => {
                        homecomings.next();
                        homecoming.take_in::<B>(backend, workspace, home, (&arrived.buffer, &arrived.ready))?;
                        sums.homecomings.push(arrived.buffer);
                    }
                    _ => return Err(Error::Comm { peer: hop.peer, step: hop.step, what: format!("{:?} without a place", hop.channel) }),
                }
            }
            flight.post(&leg.after, fresh.as_ref(), |hop| sums.spare(hop))?;
            sums.sent = fresh.map(|(sum, _)| sum);
            coming_home = &leg.homecomings;
            blocks.advance();
        }
        blocks.put_back();
        let mut late = None;
        if shared.late_rows() > 0 {
            let mut own = spare::<B::Space>(&mut buffers.blocks, local.keys.len() as u64 * spec.kv_record().bytes())?;
            let packed = backend.pack(workspace, inputs, &mut own)?;
            let part = shared.late_part::<B::Space>(spec, &own)?;
            shared.coordinates.kv[*place].expand(&shared.late_set(), &mut buffers.rows);
            let block = Block { buffer: &part, ready: &packed, rows: &buffers.rows };
            let mut sum = spare::<B::Space>(sums.stock, shared.late_rows() * spec.gradient_record().bytes())?;
            let ready = backend.attend_backward(workspace, inputs, saved, &block, &mut sum, &mut || flight.tick())?;
            buffers.blocks.push(own);
            late = Some((sum, ready));
        }
        for ((_, arrived), homecoming) in flight.land()?.into_iter().zip(coming_home) {
            homecoming.take_in::<B>(backend, workspace, home, (&arrived.buffer, &arrived.ready))?;
            sums.homecomings.push(arrived.buffer);
        }
        if let Some((sum, ready)) = late {
            shared.way.late.take_in::<B>(backend, workspace, home, (&sum, &ready))?;
            sums.stock.push(sum);
        }
        sums.recycle();
        let bytes = |leg: &Leg| leg.before.bytes_sent() + leg.after.bytes_sent();
        let bytes_predicted = shared.way.legs.iter().map(bytes).sum();
        Ok(Report { waiting_seconds: flight.waited.as_secs_f64(), bytes_predicted, ..Report::default() })
    }
}

/// The gradient buffers of one pass.
struct Sums<'a, S: Space> {
    stock: &'a mut Vec<S::Buffer>,
    homecomings: &'a mut Vec<S::Buffer>,
    /// Posted after the step before; free once everything has landed.
    sent: Option<S::Buffer>,
}

impl<S: Space> Sums<'_, S> {
    /// A buffer for a gradient that arrives.
    fn spare(&mut self, hop: &Hop) -> Result<S::Buffer> {
        spare::<S>(if hop.channel == Channel::Home { self.homecomings } else { self.stock }, hop.bytes())
    }

    fn recycle(&mut self) {
        self.stock.extend(self.sent.take());
    }
}
