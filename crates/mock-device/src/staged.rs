//! Copies between the memory of the mock device and host memory for [`annulus_comm::Staged`]: they
//! are started, then polled.

use std::ops::Range;

use annulus_core::{Arrived, HostBuffer, Result, StagedSpace, Tick};

use super::{
    memory::{Device, DeviceBuffer, DeviceEvent, fault},
    tensor::MockSpace,
};

/// A copy to the host in progress.
pub struct Download {
    from: DeviceBuffer,
    ready: DeviceEvent,
    ranges: Vec<Range<u64>>,
    into: Option<HostBuffer>,
}

/// A copy from the host in progress.
pub struct Upload {
    done: DeviceEvent,
    sides: Option<(HostBuffer, DeviceBuffer)>,
}

impl StagedSpace for MockSpace {
    type Copier = Device;
    type Download = Download;
    type Upload = Upload;

    fn download(
        _: &mut Device,
        from: &DeviceBuffer,
        ready: &DeviceEvent,
        ranges: &[Range<u64>],
        into: HostBuffer,
    ) -> Result<Download> {
        Ok(Download {
            from: from.clone(),
            ready: ready.clone(),
            ranges: ranges.to_vec(),
            into: Some(into),
        })
    }

    fn downloaded(copier: &mut Device, copy: &mut Download) -> Result<Option<HostBuffer>> {
        if !copy.ready.poll()? {
            return Ok(None);
        }
        let Some(mut into) = copy.into.take() else {
            return Err(fault("a download was polled after its end"));
        };
        let bytes = copier.read(&copy.from, &copy.ranges)?;
        let target = into.bytes_mut().and_then(|target| target.get_mut(..bytes.len()));
        target
            .ok_or_else(|| fault("a staging buffer that is shared or too small"))?
            .copy_from_slice(&bytes);
        Ok(Some(into))
    }

    fn upload(
        copier: &mut Device,
        from: HostBuffer,
        into: DeviceBuffer,
        ranges: &[Range<u64>],
        _: Tick<'_>,
    ) -> Result<Upload> {
        let slot = into.slot();
        let ranges = ranges.to_vec();
        let bytes: u64 = ranges.iter().map(|range| range.end - range.start).sum();
        let front = from
            .bytes()
            .get(..annulus_core::index(bytes))
            .ok_or_else(|| fault("a staging buffer that is too small"))?
            .to_vec();
        let done =
            copier.enqueue(&[], &[slot], move |memory| memory.scatter(slot, &ranges, &front))?;
        Ok(Upload { done, sides: Some((from, into)) })
    }

    fn uploaded(_: &mut Device, copy: &mut Upload) -> Result<Option<(HostBuffer, Arrived<Self>)>> {
        if !copy.done.poll()? {
            return Ok(None);
        }
        let Some((from, buffer)) = copy.sides.take() else {
            return Err(fault("an upload was polled after its end"));
        };
        Ok(Some((from, Arrived { buffer, ready: copy.done.clone() })))
    }
}
