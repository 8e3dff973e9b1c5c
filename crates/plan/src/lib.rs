//! The division of attention among ranks: layouts, schedules, strategies and their predicted time.
//!
//! `annulus-core` has the mathematics of one rank; this crate has everything that depends on their
//! number. It contains no device code, no thread and no network: a plan is data. An order to read
//! it in:
//!
//! | concept | items | files |
//! |---|---|---|
//! | rows of a rank | [`Layout`], [`RingShards`] | `layout.rs` |
//! | messages of the ring | [`Needs`], [`Schedule`] | `needs/`, `schedule/` |
//! | division among ranks | [`Strategy`], [`HeadGrid`], [`StrategyTraffic`] | `strategy/` |
//! | predicted time on a machine | [`Machine`], [`Prediction`] | `machine/` |
#![forbid(unsafe_code)]

mod layout;
mod machine;
mod needs;
mod schedule;
mod strategy;

pub use layout::{CustomLayout, Layout, LeafLayout, MOST_RANKS, RingShards};
pub use machine::{ComputeRate, Link, Machine, Prediction};
pub use needs::{Needs, NeedsIndex};
pub use schedule::{
    Choice, Group, Message, OwnerPairs, RankNeeds, RankSchedule, RingTraffic, Route, Schedule,
    Step, Traffic, Violation, ViolationKind, Work, WorkMatrix, needed_rows,
};
pub use strategy::{
    ExchangeFields, GRADIENT_BUFFERS, GroupLayout, HeadAxis, HeadField, HeadGrid, RingRows,
    Strategy, StrategyBalance, StrategyTraffic, TrafficOptions, block_buffers, gradient_buffers,
};
