//! A host transport for a device's memory: a wrapper that copies through host memory, asynchronously and polled.
//!
//! ```text
//! device buffer ──download──▶ staging ──inner──▶ staging ──upload──▶ device buffer
//! ```
//! Nothing here waits for the device: [`Transport::progress`] looks whether a copy has finished, and goes on with what comes next.

use std::time::Duration;

use annulus_core::{
    Arrived, Control, Error, Host, Incoming, MessageHeader, Outgoing, Result, Space, StagedSpace,
    Transport,
};

use crate::{delegate::forward_control, ranges, staging::Staging};

/// How often copies are polled while nothing else happens.
const POLL: Duration = Duration::from_micros(100);

/// A transport for the memory space `D` over the host transport `T`. See the [module](self).
pub struct Staged<T, D: StagedSpace> {
    inner: T,
    copier: D::Copier,
    staging: Staging,
    /// Sends that are still copied to the host, in the order in which they were posted.
    downloads: Vec<(MessageHeader, D::Download)>,
    /// Receives whose bytes are not on the host yet.
    receives: Vec<Receive<D>>,
    uploads: Vec<(MessageHeader, D::Upload)>,
    arrived: Vec<(MessageHeader, Arrived<D>)>,
    bytes_sent: u64,
    failed: Option<Error>,
}

struct Receive<D: Space> {
    hop: MessageHeader,
    buffer: D::Buffer,
    staged: MessageHeader,
}

impl<T: Transport<Host>, D: StagedSpace> Staged<T, D> {
    /// Sends what lies in `D` over `inner`.
    pub fn new(inner: T, copier: D::Copier) -> Self {
        let (downloads, receives, uploads, arrived) =
            (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        Self {
            inner,
            copier,
            staging: Staging::default(),
            downloads,
            receives,
            uploads,
            arrived,
            bytes_sent: 0,
            failed: None,
        }
    }

    /// Remembers what killed this endpoint. A bad argument does not.
    fn remember<R>(&mut self, result: Result<R>) -> Result<R> {
        if let Err(error) = &result
            && error.is_fatal()
        {
            self.failed.get_or_insert_with(|| error.clone());
        }
        result
    }

    fn check_alive(&self) -> Result<()> {
        self.failed.clone().map_or(Ok(()), Err)
    }

    /// Hands finished downloads to the wire.
    fn send_downloaded(&mut self) -> Result<bool> {
        let mut moved = false;
        let mut place = 0;
        while let Some((_, download)) = self.downloads.get_mut(place) {
            match D::downloaded(&mut self.copier, download)? {
                Some(buffer) => {
                    let (hop, _) = self.downloads.remove(place);
                    self.inner
                        .post(&[Outgoing { hop, buffer: &buffer, ready: &() }], &mut Vec::new())?;
                    self.staging.lend(buffer);
                    moved = true;
                }
                None => place += 1,
            }
        }
        Ok(moved)
    }

    /// Takes what came over the wire and starts its upload.
    fn upload_arrived(&mut self) -> Result<bool> {
        let mut moved = false;
        let mut place = 0;
        while let Some(receive) = self.receives.get(place) {
            match self.inner.take(&receive.staged)? {
                Some(Arrived { buffer: staged, .. }) => {
                    let Receive { hop, buffer, .. } = self.receives.swap_remove(place);
                    let upload = D::upload(&mut self.copier, staged, buffer, &hop.ranges)?;
                    self.uploads.push((hop, upload));
                    moved = true;
                }
                None => place += 1,
            }
        }
        Ok(moved)
    }

    fn finish_uploads(&mut self) -> Result<bool> {
        let mut moved = false;
        let mut place = 0;
        while let Some((_, upload)) = self.uploads.get_mut(place) {
            match D::uploaded(&mut self.copier, upload)? {
                Some((staged, arrived)) => {
                    let (hop, _) = self.uploads.swap_remove(place);
                    self.staging.give(staged);
                    self.arrived.push((hop, arrived));
                    moved = true;
                }
                None => place += 1,
            }
        }
        Ok(moved)
    }

    /// Does everything that can be done without waiting; whether anything was.
    fn pump(&mut self) -> Result<bool> {
        let sent = self.send_downloaded()?;
        let came = self.upload_arrived()?;
        Ok(self.finish_uploads()? || came || sent)
    }

    fn try_post(
        &mut self,
        sends: &[Outgoing<'_, D>],
        receives: &mut Vec<Incoming<D>>,
    ) -> Result<()> {
        for send in sends {
            ranges::check(&send.hop, self.inner.ranks(), D::size(send.buffer))?;
        }
        let mut staged = Vec::with_capacity(receives.len());
        for incoming in receives.iter() {
            ranges::check(&incoming.hop, self.inner.ranks(), D::size(&incoming.buffer))?;
            staged.push(Incoming {
                hop: in_front(&incoming.hop),
                buffer: self.staging.take(incoming.hop.bytes())?,
            });
        }
        let hops: Vec<MessageHeader> = staged.iter().map(|incoming| incoming.hop.clone()).collect();
        self.inner.post(&[], &mut staged)?;
        let posted = receives.drain(..).zip(hops);
        self.receives.extend(posted.map(|(Incoming { hop, buffer }, staged)| Receive {
            hop,
            buffer,
            staged,
        }));
        for Outgoing { hop, buffer, ready } in sends {
            self.bytes_sent += hop.bytes();
            let into = self.staging.take(hop.bytes())?;
            let download = D::download(&mut self.copier, buffer, ready, &hop.ranges, into)?;
            self.downloads.push((in_front(hop), download));
        }
        Ok(())
    }
}

/// The hop of the same message in a staging buffer.
fn in_front(hop: &MessageHeader) -> MessageHeader {
    MessageHeader { ranges: ranges::front(hop.bytes()), ..hop.clone() }
}

impl<T: Transport<Host>, D: StagedSpace> Transport<D> for Staged<T, D> {
    fn control(&mut self) -> &mut dyn Control {
        self
    }

    fn post(&mut self, sends: &[Outgoing<'_, D>], receives: &mut Vec<Incoming<D>>) -> Result<()> {
        self.check_alive()?;
        let posted = self.try_post(sends, receives);
        self.remember(posted)
    }

    fn progress(&mut self, patience: Duration) -> Result<()> {
        self.check_alive()?;
        let pumped = self.pump();
        let moved = self.remember(pumped)?;
        let copying = !self.downloads.is_empty() || !self.uploads.is_empty();
        let patience = match (moved, copying) {
            (true, _) => Duration::ZERO,
            (false, true) => patience.min(POLL),
            (false, false) => patience,
        };
        self.inner.progress(patience)?;
        let pumped = self.pump();
        self.remember(pumped).map(drop)
    }

    fn take(&mut self, hop: &MessageHeader) -> Result<Option<Arrived<D>>> {
        self.check_alive()?;
        let same = |other: &MessageHeader| {
            (other.peer, other.channel, other.tag) == (hop.peer, hop.channel, hop.tag)
        };
        if let Some(place) = self.arrived.iter().position(|(other, _)| same(other)) {
            return Ok(Some(self.arrived.swap_remove(place).1));
        }
        if self.receives.iter().any(|receive| same(&receive.hop))
            || self.uploads.iter().any(|(other, _)| same(other))
        {
            return Ok(None);
        }
        let got = format!("{:?} {} from rank {}", hop.channel, hop.tag, hop.peer);
        Err(Error::invalid("hop", got, "a receive that was posted and not yet taken"))
    }

    fn pending(&self) -> bool {
        !self.downloads.is_empty() || self.inner.pending()
    }

    fn bytes_sent(&self) -> u64 {
        self.bytes_sent
    }
}

impl<T: Transport<Host>, D: StagedSpace> Control for Staged<T, D> {
    forward_control! { rank ranks placement start_all_gather try_all_gather stragglers abort heartbeat last_heard last_work }
}

impl<T: std::fmt::Debug, D: StagedSpace> std::fmt::Debug for Staged<T, D> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Staged").field("inner", &self.inner).finish_non_exhaustive()
    }
}
