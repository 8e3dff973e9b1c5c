//! Tracing spans of a pass, as a subscriber receives them.

#![expect(clippy::unwrap_used, reason = "a test")]

use std::sync::{
    Arc, Mutex,
    atomic::{AtomicU64, Ordering},
};

use annulus::{Attention, Dims, LocalRing, Tensors, ndarray::Array4};
use tracing::{Event, Metadata, Subscriber, span};

/// Records the names of annulus' spans.
#[derive(Default)]
struct SpanNames {
    opened: Arc<Mutex<Vec<&'static str>>>,
    next: AtomicU64,
}

impl Subscriber for SpanNames {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target() == "annulus"
    }

    fn new_span(&self, span: &span::Attributes<'_>) -> span::Id {
        self.opened.lock().unwrap().push(span.metadata().name());
        span::Id::from_u64(self.next.fetch_add(1, Ordering::Relaxed) + 1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}
    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}
    fn event(&self, _: &Event<'_>) {}
    fn enter(&self, _: &span::Id) {}
    fn exit(&self, _: &span::Id) {}
}

#[test]
fn every_pass_step_and_wait_has_a_span() {
    let names = SpanNames::default();
    let opened = Arc::clone(&names.opened);
    tracing::subscriber::set_global_default(names).unwrap();
    let x = Array4::<f32>::ones((1, 48, 1, 8));
    let tensors = Tensors::new(x.view(), x.view(), x.view());
    let mut ring = LocalRing::new(Attention::new(), Dims::new(1, 48, 1, 8), 3).unwrap();
    let forward = ring.forward(&tensors).unwrap();
    let count = |name| opened.lock().unwrap().iter().filter(|&&other| other == name).count();
    // full attention on 3 ranks: each has 1 pass, 3 steps and at least 2 waits
    assert_eq!((count("pass"), count("step")), (3, 9));
    assert!(count("wait") >= 6, "{}", count("wait"));
    ring.backward(&tensors, &forward, x.view(), None).unwrap();
    assert_eq!((count("pass"), count("step")), (6, 18));
}
