//! Connections between the ranks of one emulated communicator: a Unix socket per pair of ranks, for
//! threads or processes of one machine.
//!
//! ```text
//! sender's stream    ── Offer: length ──▶    receiver's stream
//!                    ◀──── Accept ──────
//!                    ────── Data ──────▶
//! ```
//! A message is read from memory when both streams have reached it: as late as NCCL may. A rank
//! that leaves sends Leave, because with NCCL its peers get no error; a rank whose process dies
//! does not, and counts as lost. Socket names are in Linux's abstract namespace: they are not in
//! the file system and disappear with their owner. No call blocks, except a patient leave.

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

/// Identifier of a communicator, shared by its ranks.
pub(super) type Token = [u8; 16];

/// Longest wait for pending frames when leaving: enough for any test's messages.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(1);
/// Frame header: one byte of kind, eight bytes of length.
const HEADER_BYTES: usize = 9;

/// Draws a unique token.
pub(super) fn new_token() -> Token {
    // the system seeds the keys of RandomState
    let draw = || RandomState::new().build_hasher().finish();
    let mut token = Token::default();
    token[..8].copy_from_slice(&draw().to_ne_bytes());
    token[8..].copy_from_slice(&(draw() ^ u64::from(std::process::id())).to_ne_bytes());
    token
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Offer = 1,
    Accept = 2,
    Data = 3,
    Leave = 4,
}

/// State of all connections of a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    /// Not all ranks are connected.
    Connecting,
    Connected,
    /// A peer's process died.
    Lost,
}

/// Sockets of one rank.
pub(super) struct Links {
    token: Token,
    rank: usize,
    /// Present until all ranks are connected.
    listener: Option<UnixListener>,
    /// Accepted sockets whose rank has not been received.
    unidentified: Vec<UnixStream>,
    /// By rank; `None` for this rank.
    links: Vec<Option<Link>>,
}

/// Connection to one peer.
pub(super) struct Link {
    socket: UnixStream,
    /// Bytes to be written.
    out: VecDeque<u8>,
    queued: u64,
    written: u64,
    /// Bytes read, but not parsed.
    received: Vec<u8>,
    end: Option<End>,
    /// Lengths of the messages that the peer has offered.
    pub(super) offers: VecDeque<usize>,
    /// Number of messages that the peer has accepted and that are not sent yet.
    pub(super) accepted: usize,
    /// Messages received.
    pub(super) messages: VecDeque<Vec<u8>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Left,
    Lost,
}

fn address(token: &Token, rank: usize) -> Result<SocketAddr> {
    SocketAddr::from_abstract_name(format!(
        "annulus-emulated-nccl-{:032x}-{rank}",
        u128::from_ne_bytes(*token)
    ))
}

impl Links {
    /// Opens the listener of a rank.
    pub(super) fn new(token: Token, rank: usize, ranks: usize) -> Result<Self> {
        let listener = UnixListener::bind_addr(&address(&token, rank)?)?;
        listener.set_nonblocking(true)?;
        Ok(Self {
            token,
            rank,
            listener: Some(listener),
            unidentified: Vec::new(),
            links: (0..ranks).map(|_| None).collect(),
        })
    }

    /// Connection to a peer, if there is one.
    pub(super) fn to(&mut self, peer: usize) -> Option<&mut Link> {
        self.links.get_mut(peer)?.as_mut()
    }

    /// Connects to peers, reads and writes as far as possible without blocking.
    pub(super) fn poll(&mut self) -> State {
        self.connect();
        let links = self.links.iter_mut().flatten();
        let lost = links.map(|link| link.poll()).filter(|end| *end == Some(End::Lost)).count();
        if lost > 0 {
            State::Lost
        } else if self.listener.is_some() {
            State::Connecting
        } else {
            State::Connected
        }
    }

    /// Connects to lower ranks; accepts higher ranks.
    fn connect(&mut self) {
        let Some(listener) = &self.listener else { return };
        for peer in (0..self.rank).filter(|&peer| self.links[peer].is_none()).collect::<Vec<_>>() {
            let socket =
                address(&self.token, peer).and_then(|address| UnixStream::connect_addr(&address));
            // on failure the peer has no listener yet: retried at the next poll
            self.links[peer] = socket.ok().and_then(|socket| Link::new(socket, self.rank).ok());
        }
        while let Ok((socket, _)) = listener.accept() {
            self.unidentified.extend(socket.set_nonblocking(true).is_ok().then_some(socket));
        }
        for mut socket in std::mem::take(&mut self.unidentified) {
            let mut name = [0; 8];
            match socket.read(&mut name) {
                Ok(8) => {
                    let peer = usize::from_ne_bytes(name);
                    if let Some(slot @ None) = self.links.get_mut(peer).filter(|_| peer > self.rank)
                    {
                        *slot = Some(Link::of(socket));
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    self.unidentified.push(socket)
                }
                // closed before it sent its rank
                _ => {}
            }
        }
        let met = self.links.iter().flatten().count() + 1;
        if met == self.links.len() {
            self.listener = None;
        }
    }

    /// Sends Leave to all peers; with `patiently` it waits until earlier frames are written.
    pub(super) fn leave(&mut self, patiently: bool) {
        self.connect();
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
            queued: 0,
            written: 0,
            received: Vec::new(),
            end: None,
            offers: VecDeque::new(),
            accepted: 0,
            messages: VecDeque::new(),
        }
    }

    /// Connects to a peer, sending this rank's number first.
    fn new(mut socket: UnixStream, rank: usize) -> Result<Self> {
        // the buffer of a new socket has room for the number
        socket.write_all(&rank.to_ne_bytes())?;
        socket.set_nonblocking(true)?;
        Ok(Self::of(socket))
    }

    fn queue_frame(&mut self, kind: Kind, number: usize, bytes: &[u8]) -> u64 {
        self.out.push_back(kind as u8);
        self.out.extend((number as u64).to_ne_bytes());
        self.out.extend(bytes);
        self.queued += (HEADER_BYTES + bytes.len()) as u64;
        self.queued
    }

    /// Announces a message of this length.
    pub(super) fn start_all_gather(&mut self, bytes: usize) {
        self.queue_frame(Kind::Offer, bytes, &[]);
    }

    /// Accepts the peer's oldest offer.
    pub(super) fn accept(&mut self) {
        self.queue_frame(Kind::Accept, 0, &[]);
    }

    /// Queues a message. Returns a position for [`Link::has_written`].
    pub(super) fn send(&mut self, message: &[u8]) -> u64 {
        self.queue_frame(Kind::Data, message.len(), message)
    }

    /// True if all frames up to this position are written.
    pub(super) fn has_written(&self, by: u64) -> bool {
        self.written >= by
    }

    fn poll(&mut self) -> Option<End> {
        self.read();
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
                // the socket is full, or closed, which the next read reports
                Err(_) => return,
            }
        }
    }

    fn read(&mut self) {
        let mut chunk = [0; 1 << 16];
        while self.end.is_none() {
            match self.socket.read(&mut chunk) {
                Ok(0) => self.end = Some(End::Lost),
                Ok(count) => {
                    self.received.extend_from_slice(&chunk[..count]);
                    self.parse();
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(_) => self.end = Some(End::Lost),
            }
        }
    }

    fn parse(&mut self) {
        let mut from = 0;
        while let Some((&[kind, ref number @ ..], rest)) =
            self.received[from..].split_first_chunk::<HEADER_BYTES>()
        {
            let number = usize::from_ne_bytes(*number);
            let mut length = 0;
            match kind {
                kind if kind == Kind::Offer as u8 => self.offers.push_back(number),
                kind if kind == Kind::Accept as u8 => self.accepted += 1,
                kind if kind == Kind::Data as u8 => {
                    let Some(message) = rest.get(..number) else { break };
                    self.messages.push_back(message.to_vec());
                    length = number;
                }
                kind if kind == Kind::Leave as u8 => self.end = Some(End::Left),
                _ => self.end = Some(End::Lost),
            }
            from += HEADER_BYTES + length;
        }
        self.received.drain(..from);
    }

    fn leave(mut self, patiently: bool) {
        self.queue_frame(Kind::Leave, 0, &[]);
        if patiently && self.end.is_none() {
            let ready = self
                .socket
                .set_nonblocking(false)
                .and_then(|()| self.socket.set_write_timeout(Some(LEAVE_TIMEOUT)));
            if ready.is_err() {
                return;
            }
        }
        self.write();
    }
}
