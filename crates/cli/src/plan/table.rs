//! Figures of a plan in words, as lines of the table and of the picture.

use annulus_plan::Route;

use super::{
    figures::{Bytes, Figures},
    program::title,
    ring::BetweenNodes,
    strategies::PassBytes,
};
use crate::{
    report::{bytes, count, counted, grouped},
    say,
};

impl Figures {
    /// Describes the plan in one line.
    pub(super) fn title(&self) -> String {
        title(&self.mask, [self.q_len, self.kv_len], self.ranks, self.layout)
    }

    /// Describes the strategy in one line.
    fn strategy_in_words(&self) -> String {
        let [heads, queries, columns] = self.grid;
        let name = &self.strategy;
        let members = heads * columns;
        let groups = counted(queries as u64, "group", "groups");
        let divided = match (heads, columns) {
            (1, 1) => return name.clone(),
            (_, 1) => "heads are".to_owned(),
            (1, _) => "keys are".to_owned(),
            _ => format!("heads, and keys in {columns} columns, are"),
        };
        format!("{name}: {divided} divided among {members} ranks; a ring over {groups}")
    }

    /// Describes strategy and route in one line.
    pub(super) fn subtitle(&self) -> String {
        let hops = self.hops_in_words();
        match self.strategy.as_str() {
            "ring" => hops,
            name if self.ring_ranks == self.ranks => format!("{name}: {hops}"),
            _ => format!("{}; {hops}", self.strategy_in_words()),
        }
    }

    /// Describes the exchanges of each pass of a grid and the rings between them: of a forward
    /// pass, then of a backward pass; of a ring none.
    pub(super) fn passes_in_words(&self) -> Vec<[String; 3]> {
        let [heads, queries, columns] = self.grid;
        let [kv, gradients] = if heads > 1 { [", k, v", ", dk, dv"] } else { ["", ""] };
        let merged = |parts: &str| match columns {
            1 => String::new(),
            _ => format!(", parts of {parts} merged"),
        };
        let rings = |of: &PassBytes| match queries {
            1 => "tiles of each rank; nothing circulates".to_owned(),
            _ => format!(
                "{} over {}: {}",
                counted((heads * columns) as u64, "ring", "rings"),
                counted(queries as u64, "group", "groups"),
                bytes(of.rings)
            ),
        };
        let of_backward = if columns > 1 { "lse, dout, −delta" } else { "out, lse, dout, dlse" };
        let names = [
            ("forward", format!("q{kv}"), "out, lse".to_owned(), "out"),
            ("backward", format!("q{kv}, {of_backward}"), format!("dq{gradients}"), "dq"),
        ];
        let in_words = |(of, (name, inputs, results, parts)): (&PassBytes, (_, _, _, &str))| {
            let (name, inputs, results): (&str, String, String) = (name, inputs, results);
            [
                format!("{name}: {inputs} exchanged, {}", bytes(of.before)),
                rings(of),
                format!("{results} exchanged, {}{}", bytes(of.after), merged(parts)),
            ]
        };
        self.passes.iter().flatten().zip(names).map(in_words).collect()
    }

    /// Describes the route in one line.
    fn hops_in_words(&self) -> String {
        let route = match self.route {
            Route::RelayUp => "each rank relays blocks to the next rank (relay-up)",
            Route::RelayDown => "each rank relays blocks to the previous rank (relay-down)",
            Route::Direct => "owners send blocks directly to the ranks that use them (direct)",
            Route::RailsUp { .. } => {
                "blocks pass the ranks of a node, then all move to the next node (rails-up)"
            }
            Route::RailsDown { .. } => {
                "blocks pass the ranks of a node, then all move to the previous node (rails-down)"
            }
            Route::OncePerNode { .. } => {
                "owners send blocks once to each node, whose ranks relay them (once-per-node)"
            }
        };
        match self.hops {
            0 if self.ring_ranks < self.ranks.min(2) => "no hop: nothing circulates".to_owned(),
            0 => "no hop: every rank owns all rows that it needs".to_owned(),
            1 => format!("1 hop; {route}"),
            hops => format!("{} hops; {route}", grouped(hops as u64)),
        }
    }

    /// Prints the figures.
    pub(super) fn print(&self) {
        say!("{}", self.title());
        say!("{}", self.hops_in_words());
        say!("strategy  {}", self.strategy_in_words());
        for parts in self.passes_in_words() {
            say!("          {}", parts.join("; "));
        }
        say!("forward   {}", self.forward.in_words());
        if let Some(backward) = self.backward {
            say!("backward  {}", backward.in_words());
        }
        if let Some(between) = self.between_nodes {
            say!("nodes     {}", between.in_words());
        }
        let leaves = self.leaves.iter().flat_map(|leaves| leaves.in_words());
        for (line, words) in leaves.enumerate() {
            say!("{:<9} {words}", if line == 0 { "leaves" } else { "" });
        }
        say!("work      the busiest rank has {:.3} times the mean", self.work_max_over_mean);
        say!(
            "rows      the longest shard has {:.3} times the mean; {:.3} rows sent for each row that \
             a rank needs",
            self.rows_max_over_mean,
            self.redundancy
        );
        if self.schedule_checked {
            let gradients = self.backward.map(|_| "; each gradient reaches its owner once");
            let gradients = gradients.unwrap_or_default();
            say!("checked   each row arrives once where it is needed{gradients}");
        }
        say!("");
        if self.per_rank.len() < self.ranks {
            say!("ranks with the least and the most of each figure");
        }
        self.print_ranks();
        let is_predicted = self.strategies.iter().any(|of| of.time_predicted.is_some());
        if self.strategies.len() > 1 || is_predicted {
            say!("");
            say!("strategies; * is the one above");
            self.strategies.iter().for_each(|of| say!("{}", of.in_words(&self.strategy)));
        }
        if let Some(program) = &self.program {
            program.print();
        }
    }

    /// Prints the figures of the ranks as a table.
    fn print_ranks(&self) {
        let sends_bwd = self.backward.map(|_| format!(" {:>12}", "sends bwd"));
        say!(
            "{:>5} {:>13} {:>13} {:>16} {:>7} {:>12}{}",
            "rank",
            "queries",
            "keys",
            "pairs",
            "share",
            "sends fwd",
            sends_bwd.unwrap_or_default()
        );
        for rank in &self.per_rank {
            let backward = rank.backward_bytes_sent.map(|sent| format!(" {:>12}", bytes(sent)));
            say!(
                "{:>5} {:>13} {:>13} {:>16} {:>6.2}x {:>12}{}",
                rank.rank,
                grouped(rank.q_rows),
                grouped(rank.kv_rows),
                count(rank.pairs as f64),
                rank.work_over_mean,
                bytes(rank.bytes_sent),
                backward.unwrap_or_default()
            );
        }
    }
}

impl Bytes {
    /// Formats the bytes sent and their share of the full ring's.
    pub(super) fn in_words(self) -> String {
        let Self { sent, full_ring } = self;
        if full_ring == 0 {
            return format!("{} sent", bytes(sent));
        }
        let share = sent as f64 / full_ring as f64;
        format!("{} sent, {share:.3} of the full ring's {}", bytes(sent), bytes(full_ring))
    }
}

impl BetweenNodes {
    /// Describes the bytes in one line.
    fn in_words(self) -> String {
        let step = if self.steps_max_rank == 1 { "step" } else { "steps" };
        let backward = self.backward_bytes_sent_total;
        let backward = backward.map(|sent| format!("; {} backward", bytes(sent)));
        format!(
            "{} to other nodes of {} ranks; at most {} from one rank, in {} {step}{}",
            bytes(self.bytes_sent_total),
            self.node_ranks,
            bytes(self.bytes_max_rank),
            self.steps_max_rank,
            backward.unwrap_or_default()
        )
    }
}
