//! Functions of the host that a profiler's ranges call.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
    thread::{self, ThreadId},
};

use annulus::{
    Attention, Cpu, Dims, LocalRing, Plan, Tensors, comm::profiler::set_range_hooks,
    ndarray::Array4,
};

type Calls = Arc<Mutex<Vec<(ThreadId, bool, &'static str)>>>;

#[test]
fn ranges_nest_on_each_thread_and_cover_passes_steps_and_waits() {
    let calls = Calls::default();
    let (begins, ends) = (Arc::clone(&calls), Arc::clone(&calls));
    let record = |calls: &Calls, begins: bool, name| {
        calls.lock().unwrap().push((thread::current().id(), begins, name));
    };
    set_range_hooks(
        move |name| {
            record(&begins, true, name);
            assert_ne!(name, "wait", "a panic of the host's function is ignored");
        },
        move |name| record(&ends, false, name),
    )
    .unwrap();
    let again = set_range_hooks(|_| {}, |_| {}).unwrap_err();
    assert!(again.to_string().starts_with("range hooks: got a second pair"), "{again}");

    let dims = Dims::new(1, 64, 2, 8);
    let mut ring = LocalRing::from_plans(&Attention::new(), dims, 2, |_, setup, endpoint| {
        Plan::with_backend(setup, dims, Cpu::new(1)?, endpoint)
    })
    .unwrap();
    let x = Array4::<f32>::ones((1, 64, 2, 8));
    let tensors = Tensors::new(x.view(), x.view(), x.view());
    let forward = ring.forward(&tensors).unwrap();
    ring.backward(&tensors, &forward, x.view(), None).unwrap();
    drop(ring);

    let mut open: HashMap<ThreadId, Vec<&str>> = HashMap::new();
    let mut counts: HashMap<&str, usize> = HashMap::new();
    for &(thread, begins, name) in calls.lock().unwrap().iter() {
        let stack = open.entry(thread).or_default();
        if begins {
            let is_pass = ["forward", "backward"].contains(&name);
            assert_eq!(stack.is_empty(), is_pass, "{name} within {stack:?}");
            *counts.entry(name).or_default() += 1;
            stack.push(name);
        } else {
            assert_eq!(stack.pop(), Some(name));
        }
    }
    assert!(open.values().all(Vec::is_empty));
    // two ranks; two steps of a pass each
    assert_eq!((counts["forward"], counts["backward"]), (2, 2));
    assert_eq!(counts["step"], 8);
    assert!(counts["wait"] > 0);
}
