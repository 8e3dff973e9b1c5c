//! Forward: keys and values travel, the accumulator stays.

use annulus_core::{Backend, Block, Inputs, Outputs, Result};

use super::{Report, Ring, blocks::Blocks, buffers::spare, flight::Flight};

impl<B: Backend> Ring<B> {
    pub(super) fn forward_pass(
        &mut self,
        inputs: &Inputs<'_, B::Space>,
        outputs: &mut Outputs<'_, B::Space>,
        first_tag: u64,
    ) -> Result<Report> {
        let Self { backend, workspace, transport, shared, buffers, route, spec, local, .. } = self;
        backend.begin(workspace, inputs)?;
        let mut home = spare::<B::Space>(&mut buffers.blocks, local.keys.len() as u64 * spec.kv_record().bytes())?;
        let packed = backend.pack(workspace, inputs, &mut home)?;
        let mut blocks = Blocks::new(home, packed, *route, &mut buffers.blocks);
        let mut flight = Flight::new(transport.as_mut(), first_tag);
        for leg in &shared.way.legs {
            blocks.post_next(leg, &mut flight)?;
            if let Some((buffer, ready)) = blocks.here() {
                shared.coordinates.kv[leg.owner].expand(&leg.rows, &mut buffers.rows);
                let block = Block { buffer, ready, rows: &buffers.rows };
                backend.attend(workspace, inputs, &block, &mut || flight.tick())?;
            }
            for (_, arrived) in flight.land()? {
                blocks.arrive(arrived);
            }
            blocks.advance();
        }
        blocks.put_back();
        backend.finish(workspace, inputs, outputs)?;
        let bytes_predicted = shared.way.legs.iter().map(|leg| leg.before.bytes_sent()).sum();
        Ok(Report { waiting_seconds: flight.waited.as_secs_f64(), bytes_predicted, ..Report::default() })
    }
}
