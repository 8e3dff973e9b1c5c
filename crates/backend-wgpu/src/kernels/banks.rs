//! Bank conflicts of the tile kernels, by the index expressions of their generated text.
//!
//! Workgroup memory has 32 banks of 4 bytes, and a device accesses 128 bytes at once: vectors of 4
//! of eight invocations. They must lie in different banks, or be the same vector.

use naga::{
    BinaryOperator, Block, Expression, Function, Handle, Literal, Module, Statement, front::wgsl,
};

use super::*;

/// A value in each invocation of a workgroup.
type Lanes = Vec<u32>;

/// A function as it is called.
struct Frame<'a> {
    module: &'a Module,
    function: &'a Function,
    /// Invocations of a workgroup.
    invocations: usize,
    /// `None`: not known from the invocation alone.
    arguments: Vec<Option<Lanes>>,
    stores: Vec<(Handle<Expression>, Handle<Expression>)>,
    calls: Vec<(Handle<Function>, &'a [Handle<Expression>])>,
}

impl<'a> Frame<'a> {
    fn new(
        module: &'a Module,
        function: &'a Function,
        invocations: usize,
        arguments: Vec<Option<Lanes>>,
    ) -> Self {
        let (stores, calls) = (Vec::new(), Vec::new());
        let mut frame = Self { module, function, invocations, arguments, stores, calls };
        frame.collect(&function.body);
        frame
    }

    /// Collects the stores and calls of a block.
    fn collect(&mut self, block: &'a Block) {
        for statement in block.iter() {
            match statement {
                Statement::Block(inner) => self.collect(inner),
                Statement::If { accept, reject, .. } => {
                    self.collect(accept);
                    self.collect(reject);
                }
                Statement::Loop { body, continuing, .. } => {
                    self.collect(body);
                    self.collect(continuing);
                }
                Statement::Store { pointer, value } => self.stores.push((*pointer, *value)),
                Statement::Call { function, arguments, .. } => {
                    self.calls.push((*function, arguments));
                }
                _ => {}
            }
        }
    }

    fn expression(&self, of: Handle<Expression>) -> &Expression {
        &self.function.expressions[of]
    }

    /// Value of an expression. Loop variables are 0, `variable` while its stores are evaluated.
    fn value(&self, of: Handle<Expression>, variable: Option<&Expression>) -> Option<Lanes> {
        match *self.expression(of) {
            Expression::Literal(Literal::U32(value)) => Some(vec![value; self.invocations]),
            Expression::FunctionArgument(number) => self.arguments[number as usize].clone(),
            Expression::Binary { op, left, right } => {
                let left = self.value(left, variable)?;
                let right = self.value(right, variable)?;
                left.iter().zip(&right).map(|(&left, &right)| calculate(op, left, right)).collect()
            }
            Expression::Load { pointer } => {
                let loaded = self.expression(pointer);
                let Expression::LocalVariable(local) = *loaded else { return None };
                if variable == Some(loaded) {
                    return Some(vec![0; self.invocations]);
                }
                let is_uniform = |of| {
                    self.value(of, Some(loaded)).is_some_and(|all| all.iter().all(|&x| x == all[0]))
                };
                let mut stored =
                    self.stores.iter().filter(|&&(into, _)| self.expression(into) == loaded);
                let init = self.function.local_variables[local].init;
                (stored.all(|&(_, value)| is_uniform(value)) && init.is_none_or(is_uniform))
                    .then(|| vec![0; self.invocations])
            }
            _ => None,
        }
    }

    /// Calls `check` with the element of `tile` or `right` that each invocation accesses, for every
    /// access in this function and those that it calls.
    fn each_access(&self, check: &mut impl FnMut(&str, Lanes)) {
        for (_, expression) in self.function.expressions.iter() {
            let Expression::Access { base, index } = *expression else { continue };
            let Expression::GlobalVariable(global) = *self.expression(base) else { continue };
            let name = self.module.global_variables[global].name.as_deref().unwrap_or_default();
            if ["tile", "right"].contains(&name) {
                let index = self.value(index, None);
                check(name, index.unwrap_or_else(|| panic!("{name}: an index of unknown value")));
            }
        }
        for &(function, arguments) in &self.calls {
            let arguments = arguments.iter().map(|&of| self.value(of, None)).collect();
            let function = &self.module.functions[function];
            Self::new(self.module, function, self.invocations, arguments).each_access(check);
        }
    }
}

fn calculate(op: BinaryOperator, left: u32, right: u32) -> Option<u32> {
    Some(match op {
        BinaryOperator::Add => left + right,
        BinaryOperator::Subtract => left.checked_sub(right)?,
        BinaryOperator::Multiply => left * right,
        BinaryOperator::Divide => left.checked_div(right)?,
        BinaryOperator::Modulo => left.checked_rem(right)?,
        BinaryOperator::And => left & right,
        BinaryOperator::InclusiveOr => left | right,
        BinaryOperator::ShiftLeft => left << right,
        BinaryOperator::ShiftRight => left >> right,
        _ => return None,
    })
}

/// Number of 128-byte accesses that eight invocations take for vectors of 4.
fn passes(vectors: &[u32]) -> usize {
    let of_bank = |bank| {
        let mut words: Vec<u32> =
            vectors.iter().copied().filter(|at| 4 * at % 32 == bank).collect();
        words.sort_unstable();
        words.dedup();
        words.len()
    };
    (0..32).step_by(4).map(of_bank).max().unwrap_or(0)
}

#[test]
fn conflicts_are_counted() {
    assert_eq!(passes(&[0, 1, 2, 3, 4, 5, 6, 7]), 1);
    assert_eq!(passes(&[5; 8]), 1);
    assert_eq!(passes(&[0, 8, 16, 24, 32, 40, 48, 56]), 8);
    assert_eq!(passes(&[0, 9, 18, 27, 36, 45, 54, 63]), 1);
}

#[test]
fn eight_invocations_access_different_banks() {
    let mut count = 0;
    for epilogue in Epilogue::ALL {
        let tiles =
            RegisterTile::ALL.map(|tile| [(tile, Level::Plain, 1), (tile, Level::Subgroup, 2)]);
        for (register_tile, level, groups) in tiles.into_iter().flatten() {
            let tile = TileVariant {
                storage: Storage::F32,
                unpacks: false,
                aligned: true,
                head_groups: groups,
                value_groups: groups,
                epilogue,
                decodes: false,
                register_tile,
                level,
                matrices: None,
            };
            let variants = [
                Variant::Forward(tile),
                Variant::Forward(TileVariant { decodes: true, ..tile }),
                Variant::BackwardQueries(tile),
                Variant::BackwardKeys(tile, false),
            ];
            for variant in variants {
                let module = wgsl::parse_str(&variant.source().wgsl).expect("a valid kernel");
                let function = &module.entry_points[0].function;
                let lane = naga::Binding::BuiltIn(naga::BuiltIn::LocalInvocationIndex);
                let invocations = register_tile.invocations();
                let arguments = function.arguments.iter().map(|argument| {
                    (argument.binding.as_ref() == Some(&lane)).then(|| (0..invocations).collect())
                });
                let frame =
                    Frame::new(&module, function, invocations as usize, arguments.collect());
                frame.each_access(&mut |name, at| {
                    count += 1;
                    for eight in at.chunks(8) {
                        assert_eq!(passes(eight), 1, "{variant:?}, {name}: {eight:?}");
                    }
                });
            }
        }
    }
    assert!(count > 2000, "{count} accesses");
}
