//! Memory space of [`crate::OnHost`].

use std::{marker::PhantomData, ops::Range};

use crate::{Arrived, DType, HostBuffer, HostView, HostViewMut, Result, Space, StagedSpace, Tick};

/// The space of [`crate::OnHost`]: tensors in host memory, blocks and events of the device space
/// `D`.
#[derive(Debug, Clone, Copy)]
pub struct HostViews<D>(PhantomData<fn() -> D>);

impl<D: Space> Space for HostViews<D> {
    type Buffer = D::Buffer;
    type View<'a> = HostView<'a>;
    type ViewMut<'a> = HostViewMut<'a>;
    type Event = D::Event;

    const HAS_PARTS: bool = D::HAS_PARTS;
    const HOST_TENSORS: bool = true;

    fn size(buffer: &D::Buffer) -> u64 {
        D::size(buffer)
    }

    fn is_shared(buffer: &D::Buffer) -> bool {
        D::is_shared(buffer)
    }

    fn part(buffer: &D::Buffer, bytes: Range<u64>) -> Option<D::Buffer> {
        D::part(buffer, bytes)
    }

    fn reborrow<'short>(view: &'short HostView<'_>) -> HostView<'short> {
        view.reborrow()
    }

    fn host_view_mut<'short>(view: &'short mut HostViewMut<'_>) -> Option<HostViewMut<'short>> {
        Some(view.reborrow())
    }

    fn describe(view: &HostView<'_>) -> (DType, [usize; 4]) {
        (view.dtype(), view.shape())
    }

    fn describe_mut(view: &HostViewMut<'_>) -> (DType, [usize; 4]) {
        (view.dtype(), view.shape())
    }
}

impl<D: StagedSpace> StagedSpace for HostViews<D> {
    type Copier = D::Copier;
    type Download = D::Download;
    type Upload = D::Upload;

    fn staging_buffer(copier: &mut D::Copier, bytes: u64) -> Result<HostBuffer> {
        D::staging_buffer(copier, bytes)
    }

    fn download(
        copier: &mut D::Copier,
        from: &D::Buffer,
        ready: &D::Event,
        ranges: &[Range<u64>],
        into: HostBuffer,
    ) -> Result<D::Download> {
        D::download(copier, from, ready, ranges, into)
    }

    fn downloaded(copier: &mut D::Copier, copy: &mut D::Download) -> Result<Option<HostBuffer>> {
        D::downloaded(copier, copy)
    }

    fn upload(
        copier: &mut D::Copier,
        from: HostBuffer,
        into: D::Buffer,
        ranges: &[Range<u64>],
        tick: Tick<'_>,
    ) -> Result<D::Upload> {
        D::upload(copier, from, into, ranges, tick)
    }

    fn uploaded(
        copier: &mut D::Copier,
        copy: &mut D::Upload,
    ) -> Result<Option<(HostBuffer, Arrived<Self>)>> {
        let Some((host, arrived)) = D::uploaded(copier, copy)? else { return Ok(None) };
        // the same buffer and event, of another space
        Ok(Some((host, Arrived { buffer: arrived.buffer, ready: arrived.ready })))
    }
}
