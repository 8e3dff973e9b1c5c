//! Forward: keys and values travel, the accumulator stays.

use annulus_core::{Backend, Inputs, Outputs, Result};

use super::{Report, Ring, blocks::Blocks, buffers::spare, flight::Flight, parts};

impl<B: Backend> Ring<B> {
    pub(super) fn forward_pass(
        &mut self,
        inputs: &Inputs<'_, B::Space>,
        outputs: &mut Outputs<'_, B::Space>,
        first_tag: u64,
    ) -> Result<Report> {
        let Self { backend, workspace, transport, shared, buffers, route, spec, local, ranks, .. } = self;
        backend.begin(workspace, inputs)?;
        let mut home = spare::<B::Space>(&mut buffers.blocks, local.keys.len() as u64 * spec.kv_record().bytes())?;
        let packed = match ranks {
            1 => backend.pack_alone(workspace, inputs, &mut home)?,
            _ => backend.pack(workspace, inputs, &mut home)?,
        };
        let blocks = Blocks::new(home, packed, *route, &mut buffers.blocks);
        let mut flight = Flight::new(transport.as_mut(), first_tag);
        parts::visit(&shared.way.legs, &shared.coordinates.kv, blocks, &mut flight, &mut buffers.rows, |_, block, tick| {
            backend.attend(workspace, inputs, block, tick)
        })?;
        backend.finish(workspace, inputs, outputs)?;
        let bytes_predicted = shared.way.legs.iter().map(|leg| leg.before.bytes_sent()).sum();
        Ok(Report { waiting_seconds: flight.waited.as_secs_f64(), bytes_predicted, ..Report::default() })
    }
}
