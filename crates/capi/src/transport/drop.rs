//! Drop of an endpoint: it sends goodbyes to the other ranks and waits for a bounded time.

use std::{
    thread,
    time::{Duration, Instant},
};

use super::{HostTransport, frame::Frame, pump::Label};

/// Time to wait for the goodbyes of the other ranks.
const FAREWELL: Duration = Duration::from_secs(1);
/// Time for a rank that failed to send its last messages.
const LAST_WORDS: Duration = Duration::from_millis(100);

impl Drop for HostTransport {
    fn drop(&mut self) {
        for peer in self.others() {
            // those that have left as well: they may be waiting for it
            drop(self.say(peer, &Frame::Goodbye, Label::Said));
        }
        let started = Instant::now();
        let is_healthy = self.failed.is_none() && self.receives.is_empty();
        if is_healthy && !thread::panicking() {
            let mut all_left = false;
            while !all_left && started.elapsed() < FAREWELL {
                if self.wait(Duration::from_millis(10)).is_err() {
                    break;
                }
                let left = |peer: usize| self.peers[peer].has_left();
                all_left = self.requests.is_empty() && self.others().into_iter().all(left);
            }
        } else {
            let is_speaking = |label: &Label| matches!(label, Label::Said);
            while self.requests.labels().any(is_speaking) && started.elapsed() < LAST_WORDS {
                // what is received is not looked at any more
                let done = self.requests.next_done(0);
                if !matches!(done, Ok(Some(_))) {
                    thread::sleep(Duration::from_millis(1));
                }
            }
        }
        // dropping the requests cancels what is still in flight
    }
}
