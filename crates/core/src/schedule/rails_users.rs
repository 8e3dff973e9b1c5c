//! First and last users of all rows on rails, in O(ranks · ranks of a node) time but for a
//! logarithm.
//!
//! Nodes, and ranks in a node, are numbered in the direction of the rails. The block of rank i of
//! node a passes the nodes a, a + 1 … in a circle, after k of them the ranks i − k, i − k + 1 … of a
//! node in a circle. Of a circle from c the last user of a position is the largest one below c or,
//! if there is none, the largest one of all: both are colours of a painting (`painted.rs`), once for
//! the nodes, whose intervals are those of their ranks, and once for each node and c (`circle.rs`).
//!
//! The first user is found by numbering in the other direction: the first of a circle from c is the
//! last of a circle from beyond c. The owner's node comes first among the nodes then.

use super::{
    Route,
    circle::Circle,
    painted::{Colour, Painting},
};
use crate::needs::{BatchNeeds, StridedRows, ascending, count_below};

/// The first or the last user of a row.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum End {
    First,
    Last,
}

/// Rows of one owner of which the same user is the first or the last.
pub(super) struct EndUsers {
    pub(super) owner: usize,
    /// Step in which the user computes on the rows, at least 1.
    pub(super) step: usize,
    pub(super) rows: u64,
}

/// Calls `found` for all rows that are sent on `route`, which are rails over nodes of `size` ranks,
/// in groups of rows with the same owner and user, until it returns false. Calls `tick` after each
/// owner.
pub(super) fn for_each_user_of_rails(
    needs: &BatchNeeds,
    route: Route,
    end: End,
    tick: &mut dyn FnMut(),
    mut found: impl FnMut(EndUsers) -> bool,
) {
    let ranks = needs.users.len();
    let size = route.period(ranks);
    let nodes = ranks / size;
    // numbers ascend towards later users
    let is_mirrored = route.is_down() != (end == End::First);
    let index = |number: usize| if is_mirrored { ranks - 1 - number } else { number };
    let of_node = |node: usize| (0..size).map(move |local| node * size + local);
    let circles: Vec<Circle> = (0..nodes)
        .map(|node| Circle::new(of_node(node).map(|number| needs.users[index(number)].as_slice())))
        .collect();
    let mut all = Painting::default();
    for node in 0..nodes {
        of_node(node).for_each(|number| all.paint(node, &needs.users[index(number)]));
    }
    let mut before = Painting::default();
    for node in 0..nodes {
        for number in of_node(node) {
            tick();
            let owner = index(number);
            let of_owner = Users { circles: &circles, before: &before, all: &all, node, size, end };
            let mut goes_on = true;
            for rows in &needs.owners[owner] {
                of_owner.for_each(number % size, rows, |user, rows| {
                    let step = route.step(index(user), owner, ranks);
                    goes_on = goes_on && found(EndUsers { owner, step, rows });
                });
            }
            if !goes_on {
                return;
            }
        }
        of_node(node).for_each(|number| before.paint(node, &needs.users[index(number)]));
    }
}

/// Users of the rows of one node.
struct Users<'a> {
    circles: &'a [Circle],
    /// Nodes before this one, and all nodes.
    before: &'a Painting,
    all: &'a Painting,
    node: usize,
    size: usize,
    end: End,
}

impl Users<'_> {
    /// Calls `found` with the number of a user, and that of the rows of local rank `owner` of which
    /// it is the first or the last.
    fn for_each(&self, owner: usize, rows: &StridedRows, mut found: impl FnMut(usize, u64)) {
        let run = ascending(&rows.positions);
        let mut index = 0;
        while index < run.count {
            let Colour { end, user } = self.at(owner, rows.segment, run.at(index));
            let next = count_below(&run, end).max(index + 1);
            if let Some(user) = user {
                found(user, next - index);
            }
            index = next;
        }
    }

    /// Returns the number of the first or last user of a position of local rank `owner`.
    fn at(&self, owner: usize, segment: usize, position: i64) -> Colour {
        let number = |node: usize, colour: Colour| Colour {
            user: colour.user.map(|local| node * self.size + local),
            ..colour
        };
        let own = number(self.node, self.circles[self.node].last_but(owner, segment, position));
        if self.end == End::First && own.user.is_some() {
            return own;
        }
        let before = self.before.at(segment, position);
        let all = self.all.at(segment, position);
        let until = own.end.min(before.end).min(all.end);
        let Some(node) = before.user.or(all.user) else { return Colour { end: until, user: None } };
        if node == self.node {
            // in the numbers of `First` the own node, which has no user, is the last one
            let user = own.user;
            return Colour { end: until, user };
        }
        let start = self.start(owner, node);
        let of_node = number(node, self.circles[node].last(start, segment, position));
        Colour { end: until.min(of_node.end), user: of_node.user }
    }

    /// Returns where the circle starts in which the block of local rank `owner` passes `node`.
    fn start(&self, owner: usize, node: usize) -> usize {
        let nodes = self.circles.len();
        let size = self.size;
        match self.end {
            End::Last => {
                let moves = (node + nodes - self.node) % nodes;
                (owner + size - moves % size) % size
            }
            End::First => {
                // in mirrored numbers: c = i − k is size − 1 − c, and the circle starts beyond it
                let moves = (self.node + nodes - node) % nodes;
                (owner + moves % size) % size + 1
            }
        }
    }
}
