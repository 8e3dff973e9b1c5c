//! Planning one rank of a ring takes memory in O(ranks), not in O(ranks²), however long the
//! sequence is.

use std::{
    alloc::{GlobalAlloc, Layout as Allocation, System},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use annulus_core::{Alignment, DType, Dims, Spec, mask};
use annulus_plan::{
    Choice, Layout, NeedsIndex, RankSchedule, RingShards, RingTraffic, Route, Work,
};

/// Counts the bytes that are allocated at once.
struct Counting;

static LIVE: AtomicUsize = AtomicUsize::new(0);
static MOST: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is forwarded unchanged to the system allocator, which fulfils the contract;
// counting has no effect on it.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Allocation) -> *mut u8 {
        let live = LIVE.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        MOST.fetch_max(live, Ordering::Relaxed);
        // SAFETY: the caller fulfils the contract of `alloc`, which is the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Allocation) {
        LIVE.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: `pointer` came from `System.alloc` with this layout (see `alloc`); the caller
        // fulfils the rest of the contract.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Returns the most bytes that `work` has allocated at once.
fn most_bytes(work: impl FnOnce()) -> usize {
    let before = LIVE.load(Ordering::Relaxed);
    MOST.store(before, Ordering::Relaxed);
    work();
    MOST.load(Ordering::Relaxed) - before
}

/// Plans one rank of causal attention.
fn plan(ranks: usize, rows_per_rank: usize, layout: &Layout) {
    let causal = mask::Causal::default();
    let dims = Dims::new(1, ranks * rows_per_rank, 8, 64);
    let shards = RingShards::plain(&dims, Alignment::TopLeft, layout, ranks);
    let tick = &mut || ();
    for route in Route::ALL {
        let needs = NeedsIndex::of_queries(&causal, 8, 1, &shards, tick);
        let schedule = RankSchedule::derive(&needs, route, true, ranks / 3, tick);
        assert_eq!(schedule.steps.len(), ranks);
        let queries = NeedsIndex::of_keys(&causal, 8, 1, &shards, tick);
        let schedule = RankSchedule::derive(&queries, route, false, ranks / 3, tick);
        assert_eq!(schedule.steps.len(), ranks);
    }
    let needs = NeedsIndex::of_queries(&causal, 8, 1, &shards, tick);
    if ranks * rows_per_rank <= 1 << 13 {
        assert_eq!(RingTraffic::of(&needs, Route::RelayDown, tick).of_rank.len(), ranks);
    }
    assert!(Work::of(&causal, 8, 1, &shards).total() > 0);
}

/// The only test of this program, so that no other test allocates meanwhile.
#[test]
fn planning_one_rank_takes_memory_for_each_rank_and_for_no_pair_of_ranks() {
    // a pair of ranks with a set of rows takes at least 24 bytes: 24 KiB a rank for 1024 of them
    let per_rank = 8192;
    for layout in [Layout::Contiguous, Layout::Zigzag] {
        for (ranks, rows) in [(1024, 8), (1024, 1 << 20), (4096, 64)] {
            let bytes = most_bytes(|| plan(ranks, rows, &layout));
            assert!(bytes < per_rank * ranks, "{layout:?}, {ranks} ranks: {bytes} bytes");
        }
    }
    let spec = Spec {
        mask: Arc::new(mask::Causal::default()),
        ..Spec::new(Dims::new(1, 4096 << 20, 8, 64), DType::F32)
    };
    let bytes = most_bytes(|| {
        let choice = Choice::auto(&spec, 4096, None, None, &mut || ());
        assert_eq!((choice.layout, choice.route), (Layout::Zigzag, Route::RelayDown));
    });
    assert!(bytes < per_rank * 4096, "{bytes} bytes");
}
