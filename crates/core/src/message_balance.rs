//! Agreement of all ranks on the messages of a plan: every send has a receive of the same length.
//!
//! ```text
//! Σ over ranks ( Σ digest(list, from, to, channel, tag, bytes) of its sends
//!              − Σ digest(list, from, to, channel, tag, bytes) of its receives ) = 0  (mod 2⁶⁴)
//! ```
//! A rank contributes one number, whatever the number of messages. If sends and receives differ,
//! the sum is 0 with a probability of 2⁻⁶⁴. Tags count from 0 within a pass, so one agreement holds
//! for every pass of a plan or batch.

use std::collections::BTreeMap;

use crate::{Channel, Fingerprint, MessageHeader};

/// Digests of the messages that one rank sends and receives in the passes of a plan.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MessageBalance {
    rank: usize,
    /// Sums of the digests of the messages to, and from, each peer.
    peers: BTreeMap<usize, [u64; 2]>,
}

impl MessageBalance {
    /// Creates the balance of a rank without messages.
    pub fn of_rank(rank: usize) -> Self {
        Self { rank, peers: BTreeMap::new() }
    }

    /// Adds a message that this rank sends. `list` numbers the message lists of a plan, because
    /// tags are unique within one only.
    pub fn send(&mut self, list: u64, message: &MessageHeader) {
        let digest = digest(list, [self.rank, message.peer], message);
        let [sent, _] = self.peers.entry(message.peer).or_default();
        *sent = sent.wrapping_add(digest);
    }

    /// Adds a message that this rank receives.
    pub fn receive(&mut self, list: u64, message: &MessageHeader) {
        let digest = digest(list, [message.peer, self.rank], message);
        let [_, received] = self.peers.entry(message.peer).or_default();
        *received = received.wrapping_add(digest);
    }

    /// Returns what was sent minus what was received, modulo 2⁶⁴.
    pub fn sum(&self) -> u64 {
        self.peers
            .values()
            .fold(0, |sum: u64, [sent, received]| sum.wrapping_add(*sent).wrapping_sub(*received))
    }

    /// Encodes the digests by peer, for [`unmatched_pair`].
    pub fn encode(&self) -> Vec<u8> {
        let of_peer = |(&peer, &[sent, received]): (&usize, &[u64; 2])| {
            [peer as u64, sent, received].map(u64::to_le_bytes)
        };
        self.peers.iter().flat_map(of_peer).flatten().collect()
    }
}

/// Returns the first ranks (from, to) of which the first one sends other messages than the second
/// one receives. `encoded` are the balances of all ranks, by rank.
pub fn unmatched_pair(encoded: &[Vec<u8>]) -> Option<[usize; 2]> {
    let mut sums: BTreeMap<[u64; 2], u64> = BTreeMap::new();
    for (rank, balance) in encoded.iter().enumerate() {
        let rank = rank as u64;
        let (numbers, _) = balance.as_chunks::<24>();
        for numbers in numbers {
            let (numbers, _) = numbers.as_chunks::<8>();
            let mut numbers = numbers.iter().map(|number| u64::from_le_bytes(*number));
            let [peer, sent, received] = std::array::from_fn(|_| numbers.next().unwrap_or(0));
            let to_peer = sums.entry([rank, peer]).or_default();
            *to_peer = to_peer.wrapping_add(sent);
            let from_peer = sums.entry([peer, rank]).or_default();
            *from_peer = from_peer.wrapping_sub(received);
        }
    }
    let (pair, _) = sums.into_iter().find(|&(_, sum)| sum != 0)?;
    Some(pair.map(crate::index))
}

/// Digests a message, so that sums of digests are unlikely to be equal if the messages are not.
///
/// # Source
/// The last step is the finaliser of splitmix64 (Stafford's variant 13). The multiplications of
/// FNV-1a alone keep differences of its input, which could cancel in a sum.
fn digest(list: u64, [from, to]: [usize; 2], message: &MessageHeader) -> u64 {
    let channel = match message.channel {
        Channel::Kv => 0,
        Channel::PartialGrad => 1,
        Channel::FinalGrad => 2,
    };
    let fields = [list, from as u64, to as u64, channel, message.tag, message.bytes()];
    let mixed = fields.into_iter().fold(Fingerprint::new(), Fingerprint::number).finish();
    let mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ mixed >> 31
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::AgreedLengths;

    /// (from, to, channel, tag, bytes)
    type Message = (usize, usize, Channel, u64, u64);

    const MESSAGES: [Message; 6] = [
        (0, 1, Channel::Kv, 0, 100),
        (0, 1, Channel::Kv, 1, 200),
        (1, 2, Channel::Kv, 0, 100),
        (2, 0, Channel::Kv, 0, 0),
        (2, 1, Channel::FinalGrad, 1, 7),
        (0, 1, Channel::PartialGrad, 1, 200),
    ];

    fn header(peer: usize, (_, _, channel, tag, bytes): Message) -> MessageHeader {
        let ranges: Arc<[_]> = Arc::from([0..bytes / 2, bytes / 2..bytes]);
        MessageHeader { peer, channel, tag, step: 0, ranges, agreed: None }
    }

    /// Balances of three ranks that send and receive these messages.
    fn balances(sent: &[Message], received: &[Message]) -> Vec<MessageBalance> {
        let mut all: Vec<_> = (0..3).map(MessageBalance::of_rank).collect();
        sent.iter().for_each(|&message| all[message.0].send(5, &header(message.1, message)));
        received.iter().for_each(|&message| all[message.1].receive(5, &header(message.0, message)));
        all
    }

    fn total(all: &[MessageBalance]) -> u64 {
        all.iter().fold(0, |total, balance| total.wrapping_add(balance.sum()))
    }

    fn pair(all: &[MessageBalance]) -> Option<[usize; 2]> {
        unmatched_pair(&all.iter().map(MessageBalance::encode).collect::<Vec<_>>())
    }

    #[test]
    fn equal_messages_in_any_order_add_up_to_zero() {
        let mut received = MESSAGES;
        received.reverse();
        let all = balances(&MESSAGES, &received);
        assert!(all.iter().any(|balance| balance.sum() != 0));
        assert!(AgreedLengths::of_total(total(&all)).is_some());
        assert_eq!(pair(&all), None);
    }

    #[test]
    fn every_difference_is_found_and_its_ranks_are_named() {
        let changes: [fn(&mut Message); 4] = [
            |message| message.4 += 1,
            |message| message.3 += 1,
            |message| message.2 = Channel::FinalGrad,
            |message| message.4 ^= 1 << 40,
        ];
        for change in changes {
            for changed in 0..4 {
                let mut received = MESSAGES;
                change(&mut received[changed]);
                let all = balances(&MESSAGES, &received);
                assert_eq!(AgreedLengths::of_total(total(&all)), None);
                assert_eq!(pair(&all), Some([MESSAGES[changed].0, MESSAGES[changed].1]));
            }
        }
        // a message that is not sent, one that is not received, and lengths that are exchanged
        let mut exchanged = MESSAGES;
        (exchanged[0].4, exchanged[1].4) = (exchanged[1].4, exchanged[0].4);
        for (sent, received) in
            [(&MESSAGES[1..], &MESSAGES[..]), (&MESSAGES, &MESSAGES[1..]), (&MESSAGES, &exchanged)]
        {
            let all = balances(sent, received);
            assert_ne!(total(&all), 0);
            assert_eq!(pair(&all), Some([0, 1]));
        }
        // another list
        let mut all = balances(&MESSAGES, &MESSAGES);
        all[0].send(1, &header(1, MESSAGES[0]));
        all[1].receive(2, &header(0, MESSAGES[0]));
        assert_ne!(total(&all), 0);
    }
}
