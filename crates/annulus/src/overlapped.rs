//! Passes on a thread of their own, which overlap with the program.
//!
//! | | tensors | ends at the latest |
//! |---|---|---|
//! | [`StartedPass`] | borrowed for a [`std::thread::scope`] | with the scope |
//! | [`Overlapped`] | owned by the pass | when it is dropped |
//!
//! A forked child does not have the thread of its parent's pass: there, a wait is an error, and a
//! drop leaks the handle of the thread, which cannot be joined.
//!
//! A started pass is a thread and not a state machine, because kernels and the ring loop have no
//! points at which they could return to the program. Borrowed tensors need a thread scope, because
//! a value that ends a borrow when it is dropped can be leaked. The deadline wrapper, which every
//! wait polls, reads the flag that cancels a pass.

use std::{
    fmt, mem,
    sync::mpsc,
    thread::{self, JoinHandle, Scope, ScopedJoinHandle},
};

use annulus_comm::{Cancellation, caught};
use annulus_core::{Error, Process, Result};

/// A plan whose passes can run on a thread of their own.
pub trait OverlapPlan: Send {
    /// Returns true if another thread than the one that made the plan may use it.
    fn any_thread(&self) -> bool;

    /// Returns the flags that end a pass of the ranks of this process.
    fn cancellations(&self) -> Vec<Cancellation>;
}

/// A pass under way on a thread of its own. It borrows its plan and its tensors, so that the
/// compiler refuses every other use of them.
///
/// Dropping it before [`StartedPass::wait`] cancels the pass: the drop returns after the tile or
/// the wait under way, and the plan is dead on all ranks, unless the pass had ended. A pass that is
/// leaked ends with its scope.
///
/// # Examples
/// The program computes while the pass runs.
/// ```
/// use annulus::{Attention, Dims, LocalRing, Tensors};
/// use ndarray::Array4;
///
/// let x = Array4::<f32>::ones((1, 64, 2, 16));
/// let attention = Attention::new().causal(true);
/// let mut ring = LocalRing::new(&attention, Dims::new(1, 64, 2, 16), 2)?;
/// let mut work = 0;
/// let forward = std::thread::scope(|scope| {
///     let tensors = Tensors::new(x.view(), x.view(), x.view());
///     let pass = ring.start(scope, move |ring| ring.forward(&tensors))?;
///     while !pass.test() {
///         work += 1; // of the program
///     }
///     pass.wait()
/// })?;
/// assert_eq!(forward.out.dim(), x.dim());
/// # Ok::<(), annulus::Error>(())
/// ```
/// A second pass of the plan is refused by the compiler until the scope has ended.
/// ```compile_fail,E0499
/// # use annulus::{Attention, Dims, LocalRing, Tensors};
/// # let x = ndarray::Array4::<f32>::ones((1, 64, 2, 16));
/// # let mut ring = LocalRing::new(Attention::new(), Dims::new(1, 64, 2, 16), 2).unwrap();
/// # let tensors = Tensors::new(x.view(), x.view(), x.view());
/// std::thread::scope(|scope| {
///     let first = ring.start(scope, |ring| ring.forward(&tensors)).unwrap();
///     let second = ring.start(scope, |ring| ring.forward(&tensors)).unwrap();
/// });
/// ```
#[must_use = "dropping a pass cancels it"]
pub struct StartedPass<'scope, R> {
    /// `None` once the pass was waited for.
    thread: Option<ScopedJoinHandle<'scope, Result<R>>>,
    cancellations: Vec<Cancellation>,
    process: Process,
}

impl<'scope, R: Send + 'scope> StartedPass<'scope, R> {
    /// Starts `pass` with `plan` on a thread of `scope`.
    pub(crate) fn of<P: OverlapPlan>(
        plan: &'scope mut P,
        scope: &'scope Scope<'scope, '_>,
        pass: impl FnOnce(&mut P) -> Result<R> + Send + 'scope,
    ) -> Result<Self> {
        check_thread(plan)?;
        let cancellations = plan.cancellations();
        let run = move || caught(|| pass(plan));
        let thread = builder().spawn_scoped(scope, run).map_err(no_thread)?;
        Ok(Self { thread: Some(thread), cancellations, process: Process::current() })
    }
}

impl<R> StartedPass<'_, R> {
    /// Returns true if the pass has ended, so that [`StartedPass::wait`] returns at once.
    pub fn test(&self) -> bool {
        let is_finished = self.thread.as_ref().is_none_or(ScopedJoinHandle::is_finished);
        is_finished || !self.process.is_current()
    }

    /// Waits for the end of the pass and returns its result.
    ///
    /// # Errors
    /// Those of the pass; [`Error::Internal`] if it panicked; [`Error::InvalidArgument`] in a
    /// forked child, which cannot leave the scope of the pass either: it ends by `exec` or `_exit`.
    pub fn wait(mut self) -> Result<R> {
        self.process.check("pass")?;
        let thread =
            self.thread.take().ok_or_else(|| Error::internal("a pass without a thread"))?;
        thread.join().unwrap_or_else(|_| Err(panicked()))
    }
}

impl<R> Drop for StartedPass<'_, R> {
    fn drop(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        if !self.process.is_current() {
            return mem::forget(thread);
        }
        let is_finished = thread.is_finished();
        cancel(&self.cancellations, is_finished, || drop(thread.join()));
    }
}

impl<R> fmt::Debug for StartedPass<'_, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StartedPass").field("has_ended", &self.test()).finish()
    }
}

/// A plan and, at times, a pass of it under way on a thread of its own, which owns the tensors.
///
/// It can be stored between the start of a pass and its end. Until the end of a pass no other call
/// reaches the plan. Dropping it cancels the pass, as dropping a [`StartedPass`] does.
///
/// # Examples
/// ```
/// use annulus::{Attention, Dims, Forward, LocalRing, Tensors, overlapped::Overlapped};
/// use ndarray::Array4;
///
/// let ring = LocalRing::new(Attention::new(), Dims::new(1, 64, 2, 16), 2)?;
/// let mut ring = Overlapped::<LocalRing, Forward<f32>>::new(ring);
/// let x = Array4::ones((1, 64, 2, 16));
/// ring.start(move |ring| ring.forward(&Tensors::new(x.view(), x.view(), x.view())))?;
/// assert!(ring.plan_mut().is_err()); // until `wait`
/// while !ring.test() {
///     // work of the program
/// }
/// let forward = ring.wait()?;
/// assert_eq!(forward.out.dim(), (1, 64, 2, 16));
/// ring.plan_mut()?.update(&Default::default())?;
/// # Ok::<(), annulus::Error>(())
/// ```
pub struct Overlapped<P: OverlapPlan, R> {
    /// The plan, unless a pass is under way.
    plan: Option<P>,
    /// The pass under way. The thread returns the plan.
    pass: Option<JoinHandle<Result<PassEnd<P, R>>>>,
    cancellations: Vec<Cancellation>,
    process: Process,
}

/// The plan after a pass, and the result of the pass.
type PassEnd<P, R> = (P, Result<R>);

impl<P: OverlapPlan + 'static, R: Send + 'static> Overlapped<P, R> {
    /// Wraps a plan whose passes return `R`.
    pub fn new(plan: P) -> Self {
        let cancellations = plan.cancellations();
        Self { plan: Some(plan), pass: None, cancellations, process: Process::current() }
    }

    /// Returns the plan.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] while a pass is under way, and in a forked child.
    pub fn plan_mut(&mut self) -> Result<&mut P> {
        self.process.check("plan")?;
        let is_running = self.pass.is_some();
        self.plan.as_mut().ok_or_else(|| {
            if is_running {
                let got = "one with a pass under way";
                Error::invalid("plan", got, "the end of that pass before another call")
            } else {
                Error::Poisoned { first: "the thread of a pass panicked".to_owned() }
            }
        })
    }

    /// Starts a pass on a thread of its own.
    ///
    /// # Ordering
    /// Collective over the ranks, which may start the pass or call it.
    ///
    /// # Errors
    /// As [`Overlapped::plan_mut`]; [`Error::Unsupported`] if MPI forbids another thread, and
    /// [`Error::Device`] if no thread starts. The pass is not started, and the other ranks get no
    /// message: they wait for the pass, which [`Overlapped::plan_mut`] can still call.
    pub fn start(&mut self, pass: impl FnOnce(&mut P) -> Result<R> + Send + 'static) -> Result<()> {
        check_thread(self.plan_mut()?)?;
        // the plan is handed over only once the thread exists
        let (sender, receiver) = mpsc::sync_channel::<P>(1);
        let run = move || {
            let Ok(mut plan) = receiver.recv() else {
                return Err(Error::internal("a pass without a plan"));
            };
            let result = caught(|| pass(&mut plan));
            Ok((plan, result))
        };
        let thread = builder().spawn(run).map_err(no_thread)?;
        if let Some(plan) = self.plan.take() {
            sender.send(plan).map_err(Error::internal)?;
        }
        self.pass = Some(thread);
        Ok(())
    }

    /// Returns true if no pass is under way, or the pass has ended.
    pub fn test(&self) -> bool {
        let is_finished = self.pass.as_ref().is_none_or(JoinHandle::is_finished);
        is_finished || !self.process.is_current()
    }

    /// Waits for the end of the pass and returns its result.
    ///
    /// # Errors
    /// Those of the pass, [`Error::Internal`] if it panicked; [`Error::InvalidArgument`] if none
    /// was started, and in a forked child.
    pub fn wait(&mut self) -> Result<R> {
        self.process.check("plan")?;
        let Some(pass) = self.pass.take() else {
            let want = "one with a pass that was started and not waited for";
            return Err(Error::invalid("plan", "one without a pass under way", want));
        };
        let (plan, result) = pass.join().unwrap_or_else(|_| Err(panicked()))?;
        self.plan = Some(plan);
        result
    }

    /// Returns the plan.
    ///
    /// # Errors
    /// As [`Overlapped::plan_mut`]; a pass under way is cancelled.
    pub fn into_plan(mut self) -> Result<P> {
        self.plan_mut()?;
        self.plan.take().ok_or_else(|| Error::internal("a plan that is there"))
    }
}

impl<P: OverlapPlan, R> Drop for Overlapped<P, R> {
    fn drop(&mut self) {
        let Some(pass) = self.pass.take() else { return };
        if !self.process.is_current() {
            return mem::forget(pass);
        }
        let is_finished = pass.is_finished();
        cancel(&self.cancellations, is_finished, || drop(pass.join()));
    }
}

impl<P: OverlapPlan + fmt::Debug, R> fmt::Debug for Overlapped<P, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Overlapped").field("plan", &self.plan).finish_non_exhaustive()
    }
}

/// Checks that a pass may run on a thread of its own.
fn check_thread(plan: &impl OverlapPlan) -> Result<()> {
    if plan.any_thread() {
        return Ok(());
    }
    Err(Error::unsupported("a pass on a thread of its own", "an MPI below MPI_THREAD_MULTIPLE"))
}

fn builder() -> thread::Builder {
    thread::Builder::new().name("annulus pass".to_owned())
}

fn no_thread(error: std::io::Error) -> Error {
    Error::Device { what: format!("no thread for a pass: {error}") }
}

fn panicked() -> Error {
    Error::internal("the thread of a pass panicked")
}

/// Joins the thread of a pass, after cancelling the pass unless it has finished. A pass that ends
/// by itself meanwhile leaves its plan usable.
fn cancel(cancellations: &[Cancellation], is_finished: bool, join: impl FnOnce()) {
    if !is_finished {
        cancellations.iter().for_each(Cancellation::cancel);
    }
    join();
    cancellations.iter().for_each(Cancellation::reset);
}
