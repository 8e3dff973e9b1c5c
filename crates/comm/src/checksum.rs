//! Detection of corruption on the wire: a wrapper that sends a checksum with every payload.
//!
//! Each message becomes `payload ‖ checksum` in a staging buffer. This costs two more copies: it is
//! a tool to find faults, not a default. The checksum covers the payload and its length, sender and
//! receiver, channel and tag, so a message that is delivered in place of another is detected too.
//! Any single flipped bit changes it, because each word is mixed in by a bijection.

use std::time::Duration;

use annulus_core::{
    Arrived, Channel, Control, Error, Host, HostBuffer, Incoming, MessageHeader, Outgoing, Result,
    Space, Transport, index,
};

use crate::{
    delegate::forward_control,
    message::{self, Failure, MessageKey},
    staged::{StagedReceive, Staging},
};

/// Bytes of a checksum.
const CHECKSUM_BYTES: u64 = 8;

/// A transport that verifies every message. A payload that differs from the one that was sent is
/// [`Error::Comm`] "checksum mismatch …".
pub struct Checksum<T> {
    inner: T,
    staging: Staging,
    receives: Vec<StagedReceive<Host>>,
    bytes_sent: u64,
    failure: Failure,
}

impl<T: Transport<Host>> Checksum<T> {
    /// Sends and verifies a checksum with every message of `inner`. All ranks of a ring must use
    /// it.
    pub fn new(inner: T) -> Self {
        Self {
            inner,
            staging: Staging::default(),
            receives: Vec::new(),
            bytes_sent: 0,
            failure: Failure::default(),
        }
    }

    /// Copies the payload to a staging buffer and appends its checksum.
    fn stage(&mut self, send: &Outgoing<'_, Host>) -> Result<(MessageHeader, HostBuffer)> {
        message::check(&send.header, self.inner.ranks(), Host::size(send.buffer))?;
        let bytes = send.header.bytes();
        let mut staged = self.staging.take(bytes + CHECKSUM_BYTES)?;
        let message = staged.bytes_mut().ok_or_else(|| in_use(&send.header))?;
        message::copy(send.buffer.bytes(), &send.header.ranges, message, &message::front(bytes));
        let (payload, checksum) = message.split_at_mut(index(bytes));
        let digest = digest(self.inner.rank(), send.header.peer, &send.header, payload);
        checksum[..index(CHECKSUM_BYTES)].copy_from_slice(&digest.to_le_bytes());
        Ok((with_checksum(&send.header), staged))
    }

    /// Verifies a message and copies its payload to the posted buffer.
    fn verify(
        &mut self,
        StagedReceive { header, mut buffer, .. }: StagedReceive<Host>,
        staged: HostBuffer,
    ) -> Result<HostBuffer> {
        let (payload, checksum) = staged.bytes().split_at(index(header.bytes()));
        let digest = digest(header.peer, self.inner.rank(), &header, payload);
        if !checksum.starts_with(&digest.to_le_bytes()) {
            let what = format!(
                "checksum mismatch in message {:?} {} of {} bytes",
                header.channel,
                header.tag,
                payload.len()
            );
            return Err(Error::Comm { peer: header.peer, step: header.step, what });
        }
        let bytes = buffer.bytes_mut().ok_or_else(|| in_use(&header))?;
        message::copy(payload, &message::front(header.bytes()), bytes, &header.ranges);
        self.staging.give(staged);
        Ok(buffer)
    }
}

fn in_use(header: &MessageHeader) -> Error {
    Error::Comm {
        peer: header.peer,
        step: header.step,
        what: format!("a buffer of message {:?} {} is in use", header.channel, header.tag),
    }
}

/// Returns the message that carries `header` and its checksum.
fn with_checksum(header: &MessageHeader) -> MessageHeader {
    MessageHeader { ranges: message::front(header.bytes() + CHECKSUM_BYTES), ..header.clone() }
}

/// Computes the checksum: h ← rotate((h ⊕ word) · odd) over the words of the header (sender,
/// receiver, channel, tag, length) and of the payload.
///
/// The multiplier is 2⁶⁴ divided by the golden ratio, rounded to odd; the rotation carries its high
/// bits, which depend on all bits of the word, into the low ones.
fn digest(from: usize, to: usize, header: &MessageHeader, payload: &[u8]) -> u64 {
    let mix = |digest: u64, word: u64| {
        (digest ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29)
    };
    let channel = match header.channel {
        Channel::Kv => 1,
        Channel::PartialGrad => 2,
        Channel::FinalGrad => 3,
    };
    let start = [from as u64, to as u64, channel, header.tag, payload.len() as u64]
        .into_iter()
        .fold(0x0123_4567_89ab_cdef, mix);
    let (words, rest) = payload.as_chunks::<8>();
    let body = words.iter().fold(start, |digest, word| mix(digest, u64::from_le_bytes(*word)));
    let mut last = [0; 8];
    last[..rest.len()].copy_from_slice(rest);
    mix(body, u64::from_le_bytes(last))
}

impl<T: Transport<Host>> Transport<Host> for Checksum<T> {
    fn control(&mut self) -> &mut dyn Control {
        self
    }

    fn post(
        &mut self,
        sends: &[Outgoing<'_, Host>],
        receives: &mut Vec<Incoming<Host>>,
    ) -> Result<()> {
        let mut staged_sends = Vec::with_capacity(sends.len());
        for send in sends {
            staged_sends.push(self.stage(send)?);
        }
        let mut staged_receives = Vec::with_capacity(receives.len());
        for incoming in receives.iter() {
            message::check(&incoming.header, self.inner.ranks(), Host::size(&incoming.buffer))?;
            let header = with_checksum(&incoming.header);
            staged_receives.push(Incoming {
                buffer: self.staging.take(incoming.header.bytes() + CHECKSUM_BYTES)?,
                header,
            });
        }
        let staged_hops: Vec<MessageHeader> =
            staged_receives.iter().map(|incoming| incoming.header.clone()).collect();
        let outgoing: Vec<_> = staged_sends
            .iter()
            .map(|(header, buffer)| Outgoing { header: header.clone(), buffer, ready: &() })
            .collect();
        self.inner.post(&outgoing, &mut staged_receives)?;
        for (header, buffer) in staged_sends {
            self.bytes_sent += header.bytes() - CHECKSUM_BYTES;
            self.staging.lend(buffer);
        }
        let posted = receives.drain(..).zip(staged_hops);
        self.receives.extend(posted.map(|(Incoming { header, buffer }, staged)| StagedReceive {
            header,
            buffer,
            staged,
        }));
        Ok(())
    }

    fn progress(&mut self, timeout: Duration) -> Result<()> {
        self.failure.check()?;
        self.inner.progress(timeout)
    }

    fn take(&mut self, header: &MessageHeader) -> Result<Option<Arrived<Host>>> {
        self.failure.check()?;
        let key = MessageKey::of(header);
        let is_same = |receive: &StagedReceive<Host>| MessageKey::of(&receive.header) == key;
        let Some(position) = self.receives.iter().position(is_same) else {
            return self.inner.take(header);
        };
        let Some(arrived) = self.inner.take(&self.receives[position].staged)? else {
            return Ok(None);
        };
        let receive = self.receives.swap_remove(position);
        let verified = self.verify(receive, arrived.buffer);
        self.failure.remember(verified).map(|buffer| Some(Arrived { buffer, ready: () }))
    }

    annulus_core::messages_are_blocks! {}

    fn pending(&self) -> bool {
        self.inner.pending()
    }

    fn bytes_sent(&self) -> u64 {
        self.bytes_sent
    }

    fn posts_ahead(&self) -> bool {
        // messages have a checksum behind the payload
        false
    }

    fn runs_groups_in_order(&self) -> bool {
        self.inner.runs_groups_in_order()
    }
}

impl<T: Transport<Host>> Control for Checksum<T> {
    forward_control! {
        rank ranks placement start_all_gather try_all_gather stragglers abort heartbeat last_heard
        last_work
    }
}

impl<T: std::fmt::Debug> std::fmt::Debug for Checksum<T> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Checksum").field("inner", &self.inner).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn any_flipped_bit_and_any_other_header_changes_the_checksum() {
        let header = MessageHeader {
            peer: 1,
            channel: Channel::Kv,
            tag: 9,
            step: 0,
            ranges: Arc::from([]),
            agreed: None,
        };
        let mut payload: Vec<u8> = (0..37).collect();
        let correct = digest(0, 1, &header, &payload);
        for bit in 0..8 * payload.len() {
            payload[bit / 8] ^= 1 << (bit % 8);
            assert_ne!(digest(0, 1, &header, &payload), correct);
            payload[bit / 8] ^= 1 << (bit % 8);
        }
        assert_ne!(digest(1, 0, &header, &payload), correct);
        assert_ne!(digest(0, 1, &MessageHeader { tag: 10, ..header.clone() }, &payload), correct);
        assert_ne!(
            digest(
                0,
                1,
                &MessageHeader { channel: Channel::FinalGrad, ..header.clone() },
                &payload
            ),
            correct
        );
        payload.push(0);
        assert_ne!(digest(0, 1, &header, &payload), correct, "a longer payload of zeros");
    }
}
