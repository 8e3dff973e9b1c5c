//! Balance of the messages of a plan, by which all ranks prove that their lengths match.

use annulus_core::MessageBalance;

use super::{
    plan::{Agreed, RingPlan},
    reduce::slices_of_pass,
    slices::Exchange,
};

impl RingPlan {
    /// Returns the balance of the messages of all passes of `rank`.
    pub(super) fn message_balance(&self, agreed: &Agreed, rank: usize) -> MessageBalance {
        let mut balance = MessageBalance::of_rank(rank);
        for (list, slices) in (4..).zip(slices_of_pass(agreed, self)) {
            let exchange = Exchange::new(&slices, &agreed.order, rank, 0);
            exchange.all_transfers().add_to(&mut balance, list);
        }
        let of_keys = self
            .program
            .steps
            .iter()
            .flat_map(|step| [(0, &step.kv), (1, &step.kv_in_parts), (2, &step.gradients)]);
        let of_queries = self.query_steps.iter().map(|step| (3, &step.kv_in_parts));
        for (list, transfers) in of_keys.chain(of_queries) {
            transfers.add_to(&mut balance, list);
        }
        balance
    }
}
