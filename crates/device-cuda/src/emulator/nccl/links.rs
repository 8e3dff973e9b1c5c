//! What the ranks of one communicator say to each other: over a socket for every pair of them, whether they are threads or processes of this machine.
//!
//! ```text
//! sender's stream    ── offer: so many bytes ──▶    receiver's stream
//!                    ◀────────── go ────────────
//!                    ──────── the bytes ───────▶
//! ```
//! So a message is read when both streams have come to it and no sooner: as late as NCCL may. A rank that leaves says so, as its peers learn nothing of
//! that from NCCL; one whose process dies does not, and is lost. The sockets' names are abstract ones of Linux: they are in no folder, and gone with
//! whoever held them. Nothing here waits, but for the last words of one who leaves.

use std::{
    collections::VecDeque,
    hash::{BuildHasher, Hasher, RandomState},
    io::{ErrorKind, Read, Result, Write},
    os::{
        linux::net::SocketAddrExt,
        unix::net::{SocketAddr, UnixListener, UnixStream},
    },
    time::Duration,
};

/// What communicators that belong together have in common.
pub(super) type Token = [u8; 16];

/// Last words are not waited for longer than this.
const FAREWELL: Duration = Duration::from_secs(1);
/// Bytes before the bytes of a word: which word, and how many bytes.
const HEAD: usize = 9;

/// A token that nobody else has.
pub(super) fn new_token() -> Token {
    // keys of hashes are drawn by the system
    let draw = || RandomState::new().build_hasher().finish();
    let mut token = Token::default();
    token[..8].copy_from_slice(&draw().to_ne_bytes());
    token[8..].copy_from_slice(&(draw() ^ u64::from(std::process::id())).to_ne_bytes());
    token
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Word {
    Offer = 1,
    Go = 2,
    Bytes = 3,
    Farewell = 4,
}

/// How things are between all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    /// Some are not there yet.
    Meeting,
    Met,
    /// Somebody's process has gone without a word.
    Lost,
}

/// One rank's sockets.
pub(super) struct Links {
    token: Token,
    rank: usize,
    /// Until all have come.
    listener: Option<UnixListener>,
    /// Who came, and has not said who it is.
    strangers: Vec<UnixStream>,
    /// By rank; none to itself.
    links: Vec<Option<Link>>,
}

/// What there is between two ranks.
pub(super) struct Link {
    socket: UnixStream,
    /// Not written yet.
    out: VecDeque<u8>,
    said: u64,
    written: u64,
    /// Not understood yet.
    heard: Vec<u8>,
    end: Option<End>,
    /// Messages that the peer would send: bytes.
    pub(super) offers: VecDeque<usize>,
    /// Messages that the peer would have.
    pub(super) asked: usize,
    /// Messages that have come.
    pub(super) messages: VecDeque<Vec<u8>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Left,
    Lost,
}

fn address(token: &Token, rank: usize) -> Result<SocketAddr> {
    SocketAddr::from_abstract_name(format!("annulus-emulated-nccl-{:032x}-{rank}", u128::from_ne_bytes(*token)))
}

impl Links {
    /// Lets the others come.
    ///
    /// # Errors
    /// The system's, if this rank is there already.
    pub(super) fn new(token: Token, rank: usize, ranks: usize) -> Result<Self> {
        let listener = UnixListener::bind_addr(&address(&token, rank)?)?;
        listener.set_nonblocking(true)?;
        Ok(Self { token, rank, listener: Some(listener), strangers: Vec::new(), links: (0..ranks).map(|_| None).collect() })
    }

    /// The link to a peer, once they have met.
    pub(super) fn to(&mut self, peer: usize) -> Option<&mut Link> {
        self.links.get_mut(peer)?.as_mut()
    }

    /// Meets who is there, hears and says what can be heard and said.
    pub(super) fn poll(&mut self) -> State {
        self.meet();
        let links = self.links.iter_mut().flatten();
        let lost = links.map(|link| link.poll()).filter(|end| *end == Some(End::Lost)).count();
        if lost > 0 {
            State::Lost
        } else if self.listener.is_some() {
            State::Meeting
        } else {
            State::Met
        }
    }

    /// A rank goes to those before it and waits for those after it.
    fn meet(&mut self) {
        let Some(listener) = &self.listener else { return };
        for peer in (0..self.rank).filter(|&peer| self.links[peer].is_none()).collect::<Vec<_>>() {
            let socket = address(&self.token, peer).and_then(|address| UnixStream::connect_addr(&address));
            // it may come later
            self.links[peer] = socket.ok().and_then(|socket| Link::new(socket, self.rank).ok());
        }
        while let Ok((socket, _)) = listener.accept() {
            self.strangers.extend(socket.set_nonblocking(true).is_ok().then_some(socket));
        }
        for mut socket in std::mem::take(&mut self.strangers) {
            let mut name = [0; 8];
            match socket.read(&mut name) {
                Ok(8) => {
                    let peer = usize::from_ne_bytes(name);
                    if let Some(place @ None) = self.links.get_mut(peer).filter(|_| peer > self.rank) {
                        *place = Some(Link::of(socket));
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => self.strangers.push(socket),
                // it has gone
                _ => {}
            }
        }
        let met = self.links.iter().flatten().count() + 1;
        if met == self.links.len() {
            self.listener = None;
        }
    }

    /// Says farewell to everybody; `patiently`: after all that was said before.
    pub(super) fn leave(&mut self, patiently: bool) {
        self.meet();
        self.listener = None;
        for link in self.links.drain(..).flatten() {
            link.leave(patiently);
        }
    }
}

impl Link {
    fn of(socket: UnixStream) -> Self {
        Self {
            socket,
            out: VecDeque::new(),
            said: 0,
            written: 0,
            heard: Vec::new(),
            end: None,
            offers: VecDeque::new(),
            asked: 0,
            messages: VecDeque::new(),
        }
    }

    /// To a peer that has not been told who comes.
    fn new(mut socket: UnixStream, rank: usize) -> Result<Self> {
        // a new socket has room for a name
        socket.write_all(&rank.to_ne_bytes())?;
        socket.set_nonblocking(true)?;
        Ok(Self::of(socket))
    }

    fn say(&mut self, word: Word, number: usize, bytes: &[u8]) -> u64 {
        self.out.push_back(word as u8);
        self.out.extend((number as u64).to_ne_bytes());
        self.out.extend(bytes);
        self.said += (HEAD + bytes.len()) as u64;
        self.said
    }

    /// Says that there is a message.
    pub(super) fn offer(&mut self, bytes: usize) {
        self.say(Word::Offer, bytes, &[]);
    }

    /// Asks for the first message that was offered and not asked for.
    pub(super) fn go(&mut self) {
        self.say(Word::Go, 0, &[]);
    }

    /// Sends a message; [`Link::has_written`] knows when this has gone.
    pub(super) fn send(&mut self, message: &[u8]) -> u64 {
        self.say(Word::Bytes, message.len(), message)
    }

    /// Whether all that had been said by then has gone.
    pub(super) fn has_written(&self, by: u64) -> bool {
        self.written >= by
    }

    fn poll(&mut self) -> Option<End> {
        self.hear();
        self.write();
        self.end
    }

    fn write(&mut self) {
        while !self.out.is_empty() {
            match self.socket.write(self.out.as_slices().0) {
                Ok(count) => {
                    self.out.drain(..count);
                    self.written += count as u64;
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                // no room; or nobody there, which is heard
                Err(_) => return,
            }
        }
    }

    fn hear(&mut self) {
        let mut piece = [0; 1 << 16];
        while self.end.is_none() {
            match self.socket.read(&mut piece) {
                Ok(0) => self.end = Some(End::Lost),
                Ok(count) => {
                    self.heard.extend_from_slice(&piece[..count]);
                    self.understand();
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(_) => self.end = Some(End::Lost),
            }
        }
    }

    fn understand(&mut self) {
        let mut from = 0;
        while let Some((&[word, ref number @ ..], rest)) = self.heard[from..].split_first_chunk::<HEAD>() {
            let number = usize::from_ne_bytes(*number);
            let mut length = 0;
            match word {
                word if word == Word::Offer as u8 => self.offers.push_back(number),
                word if word == Word::Go as u8 => self.asked += 1,
                word if word == Word::Bytes as u8 => {
                    let Some(message) = rest.get(..number) else { break };
                    self.messages.push_back(message.to_vec());
                    length = number;
                }
                word if word == Word::Farewell as u8 => self.end = Some(End::Left),
                _ => self.end = Some(End::Lost),
            }
            from += HEAD + length;
        }
        self.heard.drain(..from);
    }

    fn leave(mut self, patiently: bool) {
        self.say(Word::Farewell, 0, &[]);
        if patiently && self.end.is_none() {
            let ready = self.socket.set_nonblocking(false).and_then(|()| self.socket.set_write_timeout(Some(FAREWELL)));
            if ready.is_err() {
                return;
            }
        }
        self.write();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn three() -> [Links; 3] {
        let token = new_token();
        let mut links = [0, 1, 2].map(|rank| Links::new(token, rank, 3).unwrap());
        // nobody has come; the second has met the first, the third both; then the first hears of both
        assert_eq!([0, 1, 2, 0, 1].map(|rank| links[rank].poll()), [State::Meeting, State::Meeting, State::Met, State::Met, State::Met]);
        assert!(links.iter_mut().all(|links| links.poll() == State::Met));
        links
    }

    #[test]
    fn messages_longer_than_a_socket_holds_arrive_whole() {
        let [mut first, _second, mut third] = three();
        let message: Vec<u8> = (0..3_000_000u32).map(|number| (number % 251) as u8).collect();
        let end = first.to(2).unwrap().send(&message);
        assert_eq!(first.poll(), State::Met);
        // nobody has read, and no socket holds so much
        assert!(!first.to(2).unwrap().has_written(end));
        for _ in 0..1000 {
            first.poll();
            third.poll();
        }
        assert!(first.to(2).unwrap().has_written(end));
        assert_eq!(third.to(0).unwrap().messages.pop_front(), Some(message));
    }

    #[test]
    fn who_leaves_says_so_and_who_is_gone_is_lost() {
        let [mut first, mut second, third] = three();
        second.to(0).unwrap().offer(7);
        second.leave(true);
        assert_eq!(first.poll(), State::Met);
        assert_eq!(first.to(1).unwrap().offers, [7]);
        drop(third);
        assert_eq!(first.poll(), State::Lost);
    }

    #[test]
    fn a_rank_is_there_once() {
        let token = new_token();
        let first = Links::new(token, 0, 2).unwrap();
        assert_eq!(Links::new(token, 0, 2).err().map(|error| error.kind()), Some(ErrorKind::AddrInUse));
        drop(first);
        // its name is gone with it
        Links::new(token, 0, 2).unwrap();
    }
}
