//! Bank conflicts of the tile kernels, by the index expressions of their generated text.
//!
//! Workgroup memory has 32 banks of 4 bytes, and a device accesses 128 bytes at once: vectors of 4
//! f32 of eight invocations, of 4 f16 of sixteen, or words of thirty-two. They must lie in
//! different banks, or be the same vector. Loads and stores of cooperative matrices depend on the
//! device; what the text decides is where their rows begin.

use std::collections::HashSet;

use naga::{
    BinaryOperator, Block, Expression, Function, Handle, Literal, Module, Statement, front::wgsl,
};

use super::*;

/// A value in each invocation of a workgroup.
type Lanes = Vec<u32>;

/// A function as it is called.
struct AccessFrame<'a> {
    module: &'a Module,
    function: &'a Function,
    /// Invocations of a workgroup.
    invocations: usize,
    /// `None`: not known from the invocation alone.
    arguments: Vec<Option<Lanes>>,
    stores: Vec<(Handle<Expression>, Handle<Expression>)>,
    calls: Vec<(Handle<Function>, &'a [Handle<Expression>])>,
    /// Pointers to the first elements of cooperative matrices.
    matrices: HashSet<Handle<Expression>>,
}

impl<'a> AccessFrame<'a> {
    fn new(
        module: &'a Module,
        function: &'a Function,
        invocations: usize,
        arguments: Vec<Option<Lanes>>,
    ) -> Self {
        let loaded = function.expressions.iter().filter_map(|(_, expression)| match expression {
            Expression::CooperativeLoad { data, .. } => Some(data.pointer),
            _ => None,
        });
        let matrices = loaded.collect();
        let (stores, calls) = (Vec::new(), Vec::new());
        let mut frame = Self { module, function, invocations, arguments, stores, calls, matrices };
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
                Statement::CooperativeStore { data, .. } => {
                    self.matrices.insert(data.pointer);
                }
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

    /// Calls `check` with the number of an array of [`ARRAYS`], and the element that each
    /// invocation accesses, for every access in this function and those that it calls.
    fn each_access(&self, check: &mut impl FnMut(usize, Lanes)) {
        for (handle, expression) in self.function.expressions.iter() {
            let Expression::Access { base, index } = *expression else { continue };
            let Expression::GlobalVariable(global) = *self.expression(base) else { continue };
            let name = self.module.global_variables[global].name.as_deref().unwrap_or_default();
            let array = ARRAYS.iter().position(|&(array, _)| array == name);
            if let Some(array) = array.filter(|_| !self.matrices.contains(&handle)) {
                let index = self.value(index, None);
                check(array, index.unwrap_or_else(|| panic!("{name}: an index of unknown value")));
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

/// Arrays of rows in workgroup memory, and the bytes of their elements: vectors of 4 f32 or f16.
const ARRAYS: [(&str, usize); 5] =
    [("tile", 16), ("right", 16), ("left_half", 8), ("right_half", 8), ("products", 16)];

/// Number of 128-byte accesses that an access of a workgroup takes, by the worst 128 / `bytes`
/// neighbours. `units` are indices of vectors of `bytes` bytes.
fn passes(units: &[u32], bytes: usize) -> usize {
    let slots = 128 / bytes;
    let of_slots = |units: &[u32]| {
        let units: HashSet<u32> = units.iter().copied().collect();
        let of_slot = |slot| units.iter().filter(|&&unit| unit as usize % slots == slot).count();
        (0..slots).map(of_slot).max().unwrap_or(0)
    };
    units.chunks(slots).map(of_slots).max().unwrap_or(0)
}

#[test]
fn conflicts_are_counted() {
    assert_eq!(passes(&[0, 1, 2, 3, 4, 5, 6, 7], 16), 1);
    assert_eq!(passes(&[5; 8], 16), 1);
    assert_eq!(passes(&[0, 8, 16, 24, 32, 40, 48, 56], 16), 8);
    assert_eq!(passes(&[0, 9, 18, 27, 36, 45, 54, 63], 16), 1);
    assert_eq!(passes(&[0, 16, 1, 17], 8), 2);
    assert_eq!(passes(&[0, 64, 32, 33], 4), 3);
}

/// Rows of a matrix begin at multiples of 16 bytes. Eight invocations load 16 bytes each of eight
/// rows of an operand, and sixteen store 8 bytes each, four of them in a row, of a result: they
/// access different banks.
#[test]
fn rows_of_matrices_begin_in_different_banks() {
    let [operand, result] = [vectors::HALF_STEP * 8, vectors::PRODUCT_STEP * 16];
    assert_eq!([operand % 16, result % 16], [0, 0]);
    let loaded: Vec<u32> = (0..8).map(|row| (row * operand / 16) as u32).collect();
    assert_eq!(passes(&loaded, 16), 1, "{loaded:?}");
    let stored: Vec<u32> = (0..16).map(|lane| (lane / 4 * result / 8 + lane % 4) as u32).collect();
    assert_eq!(passes(&stored, 8), 1, "{stored:?}");
}

#[test]
fn neighbouring_invocations_access_different_banks() {
    let mut counts = [0; ARRAYS.len()];
    let (four, two, one) = (RegisterTile::FourRows, RegisterTile::TwoRows, RegisterTile::OneRow);
    let levels = [
        (four, Level::Plain, 1, None),
        (two, Level::Plain, 1, None),
        (one, Level::Plain, 1, None),
        (four, Level::Matrix, 2, None),
        (two, Level::Matrix, 2, None),
        (one, Level::Matrix, 2, None),
        (four, Level::Matrix, 2, Some(Matrices::new(16, 64).with_smaller_subgroups())),
        (four, Level::Matrix, 8, Some(Matrices::new(8, 8))),
    ];
    for epilogue in Epilogue::ALL {
        for (register_tile, level, groups, matrices) in levels {
            let tile = TileVariant {
                storage: if matrices.is_some() { Storage::F16 } else { Storage::F32 },
                unpacks: matrices.is_some(),
                head_groups: groups,
                value_groups: groups,
                epilogue,
                register_tile,
                level,
                matrices,
                ..SIMPLE
            };
            let variants = [
                KernelVariant::Forward(tile),
                KernelVariant::Forward(TileVariant { decodes: true, ..tile }),
                KernelVariant::BackwardQueries(tile),
                KernelVariant::BackwardKeys(tile, false),
            ];
            let tall = tile
                .can_be_tall(32 << 10)
                .then_some(KernelVariant::Forward(TileVariant { tall: true, ..tile }));
            for variant in variants.into_iter().chain(tall) {
                let module = wgsl::parse_str(&variant.source().wgsl).expect("a valid kernel");
                let entry_point = &module.entry_points[0];
                let (function, [invocations, ..]) =
                    (&entry_point.function, entry_point.workgroup_size);
                let lane = naga::Binding::BuiltIn(naga::BuiltIn::LocalInvocationIndex);
                let arguments = function.arguments.iter().map(|argument| {
                    (argument.binding.as_ref() == Some(&lane)).then(|| (0..invocations).collect())
                });
                let frame =
                    AccessFrame::new(&module, function, invocations as usize, arguments.collect());
                frame.each_access(&mut |array, at| {
                    let (name, bytes) = ARRAYS[array];
                    counts[array] += 1;
                    assert_eq!(passes(&at, bytes), 1, "{variant:?}, {name}: {at:?}");
                });
            }
        }
    }
    assert!(counts.iter().all(|&count| count > 500), "{counts:?} accesses");
}
