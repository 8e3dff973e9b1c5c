//! Kernels with cooperative matrices as SPIR-V modules of Vulkan's memory model.
//!
//! Modules with cooperative matrices must have that model. In it an access to memory is private to
//! its invocation unless the instruction says otherwise, and a barrier makes writes available and
//! visible only if its semantics say so. naga 30 writes neither (wgpu issue 8805). Mesa's drivers
//! treat every access as shared, but others need not, so that the accesses and barriers of naga's
//! module are completed here.

use std::collections::HashMap;

use wgpu::naga::{
    back::spv,
    front::wgsl,
    proc::{BoundsCheckPolicies, BoundsCheckPolicy},
    valid::{Capabilities, ValidationFlags, Validator},
};

/// A translated kernel.
#[doc(hidden)]
#[derive(Debug)]
pub struct Translation {
    /// Words of the SPIR-V module.
    pub spirv: Vec<u32>,
    /// Invocations of a workgroup by axis, as in the text.
    pub workgroup_size: [u32; 3],
}

/// Words before the first instruction: magic number, version, generator, bound of ids, schema.
const HEADER: usize = 5;

/// Index of the bound of ids in the header.
const BOUND: usize = 3;

/// Opcodes of the SPIR-V specification, 3.3, and of SPV_KHR_cooperative_matrix.
mod op {
    pub(super) const TYPE_POINTER: u32 = 32;
    pub(super) const CONSTANT: u32 = 43;
    pub(super) const FUNCTION_PARAMETER: u32 = 55;
    pub(super) const VARIABLE: u32 = 59;
    pub(super) const LOAD: u32 = 61;
    pub(super) const STORE: u32 = 62;
    pub(super) const ACCESS_CHAIN: u32 = 65;
    pub(super) const IN_BOUNDS_ACCESS_CHAIN: u32 = 66;
    pub(super) const CONTROL_BARRIER: u32 = 224;
    pub(super) const MEMORY_BARRIER: u32 = 225;
    pub(super) const COOPERATIVE_MATRIX_LOAD: u32 = 4457;
    pub(super) const COOPERATIVE_MATRIX_STORE: u32 = 4458;
}

/// Storage classes of memory that invocations share: `Workgroup` and `StorageBuffer`.
const SHARED_CLASSES: [u32; 2] = [4, 12];

/// Memory operand `NonPrivatePointer`.
const NON_PRIVATE: u32 = 0x20;

/// Memory semantics `MakeAvailable` and `MakeVisible`.
const AVAILABLE_AND_VISIBLE: u32 = 0x2000 | 0x4000;

/// Memory semantics of workgroup memory, and of memory that a subgroup shares.
const WORKGROUP_MEMORY: u32 = 0x100;
const SUBGROUP_MEMORY: u32 = 0x80;

/// Semantics of a barrier that makes writes visible. That of a subgroup orders its accesses to
/// workgroup memory, too; naga names memory that only a subgroup shares, which Vulkan has not.
const fn completed_semantics(given: u32) -> u32 {
    let workgroup = if given & SUBGROUP_MEMORY == 0 { 0 } else { WORKGROUP_MEMORY };
    given | workgroup | AVAILABLE_AND_VISIBLE
}

/// Translates a kernel with cooperative matrices, with indices clamped if they are `checked`.
///
/// # Errors
/// Says what of the text is not valid.
pub(crate) fn translate(text: &str, checked: bool) -> Result<Translation, String> {
    let module = wgsl::parse_str(text).map_err(|error| error.emit_to_string(text))?;
    let info = Validator::new(ValidationFlags::all(), Capabilities::all())
        .validate(&module)
        .map_err(|error| error.emit_to_string(text))?;
    let policy = if checked { BoundsCheckPolicy::Restrict } else { BoundsCheckPolicy::Unchecked };
    let options = spv::Options {
        // of Vulkan 1.2, the oldest whose core has the memory model
        lang_version: (1, 5),
        flags: spv::WriterFlags::empty(),
        bounds_check_policies: BoundsCheckPolicies {
            index: policy,
            buffer: policy,
            ..Default::default()
        },
        // kernels write workgroup memory before they read it
        zero_initialize_workgroup_memory: spv::ZeroInitializeWorkgroupMemoryMode::None,
        emit_int_div_checks: checked,
        // an optional feature of Vulkan, for shaders that pass numbers between stages
        use_storage_input_output_16: false,
        force_loop_bounding: false,
        ..spv::Options::default()
    };
    let words =
        spv::write_vec(&module, &info, &options, None).map_err(|error| error.to_string())?;
    let [entry_point] = &module.entry_points[..] else {
        return Err("a kernel has one entry point".to_owned());
    };
    Ok(Translation {
        spirv: with_shared_memory(&words)?,
        workgroup_size: entry_point.workgroup_size,
    })
}

/// An instruction: its opcode, and the words after the first.
struct Instruction<'a> {
    opcode: u32,
    operands: &'a [u32],
}

/// Splits the words after the header into instructions.
fn instructions(words: &[u32]) -> Result<Vec<Instruction<'_>>, String> {
    let mut rest = words.get(HEADER..).ok_or("no header")?;
    let mut all = Vec::new();
    while let Some((&first, after)) = rest.split_first() {
        let length = (first >> 16) as usize;
        let operands = length.checked_sub(1).and_then(|count| after.get(..count));
        let operands = operands.ok_or_else(|| format!("an instruction of {length} words"))?;
        all.push(Instruction { opcode: first & 0xffff, operands });
        rest = &after[operands.len()..];
    }
    Ok(all)
}

/// Pointers and barrier semantics of a module, by their ids.
#[derive(Default)]
struct Ids {
    /// Storage classes of pointer types.
    classes: HashMap<u32, u32>,
    /// Types of pointers.
    pointers: HashMap<u32, u32>,
    /// Memory semantics of barriers, and the id of the completed ones.
    semantics: HashMap<u32, u32>,
}

impl Ids {
    /// Collects ids; those of completed semantics begin at `bound`.
    fn of(all: &[Instruction<'_>], mut bound: u32) -> Self {
        let mut ids = Self::default();
        for Instruction { opcode, operands } in all {
            match (*opcode, *operands) {
                (op::TYPE_POINTER, &[id, class, ..]) => {
                    ids.classes.insert(id, class);
                }
                (
                    op::VARIABLE
                    | op::FUNCTION_PARAMETER
                    | op::ACCESS_CHAIN
                    | op::IN_BOUNDS_ACCESS_CHAIN,
                    &[kind, id, ..],
                ) => {
                    ids.pointers.insert(id, kind);
                }
                (op::CONTROL_BARRIER, &[_, _, semantics])
                | (op::MEMORY_BARRIER, &[_, semantics]) => {
                    ids.semantics.entry(semantics).or_insert_with(|| {
                        bound += 1;
                        bound - 1
                    });
                }
                _ => {}
            }
        }
        ids
    }

    /// True if a pointer is one to memory that invocations share.
    fn is_shared(&self, pointer: u32) -> bool {
        let class = self.pointers.get(&pointer).and_then(|kind| self.classes.get(kind));
        class.is_some_and(|class| SHARED_CLASSES.contains(class))
    }
}

/// Position of the pointer among the operands of an access, and of the memory operands.
const fn access(opcode: u32) -> Option<(usize, usize)> {
    match opcode {
        op::LOAD => Some((2, 3)),
        op::STORE => Some((0, 2)),
        // after the layout and the stride
        op::COOPERATIVE_MATRIX_LOAD => Some((2, 5)),
        op::COOPERATIVE_MATRIX_STORE => Some((0, 4)),
        _ => None,
    }
}

/// Returns a module in which accesses to shared memory are not private, and barriers make them
/// available and visible.
fn with_shared_memory(words: &[u32]) -> Result<Vec<u32>, String> {
    let all = instructions(words)?;
    let bound = words[BOUND];
    let ids = Ids::of(&all, bound);
    let mut module = words[..HEADER].to_vec();
    module[BOUND] += u32::try_from(ids.semantics.len()).map_err(|error| error.to_string())?;
    for Instruction { opcode, operands } in all {
        let mut operands = operands.to_vec();
        if let Some((pointer, memory)) = access(opcode)
            && operands.get(pointer).is_some_and(|&pointer| ids.is_shared(pointer))
        {
            match operands.get_mut(memory) {
                Some(given) => *given |= NON_PRIVATE,
                None => operands.push(NON_PRIVATE),
            }
        }
        if let (op::CONTROL_BARRIER | op::MEMORY_BARRIER, Some(semantics)) =
            (opcode, operands.last_mut())
        {
            *semantics = ids.semantics.get(semantics).copied().unwrap_or(*semantics);
        }
        push(&mut module, opcode, &operands)?;
        if let (op::CONSTANT, &[kind, id, value]) = (opcode, &operands[..])
            && let Some(&completed) = ids.semantics.get(&id)
        {
            push(&mut module, opcode, &[kind, completed, completed_semantics(value)])?;
        }
    }
    Ok(module)
}

/// Appends an instruction.
fn push(module: &mut Vec<u32>, opcode: u32, operands: &[u32]) -> Result<(), String> {
    let length = u16::try_from(operands.len() + 1).map_err(|error| error.to_string())?;
    module.push(u32::from(length) << 16 | opcode);
    module.extend_from_slice(operands);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{choice::Matrices, kernels::matrices};

    const TEXT: &str = "
        @group(0) @binding(0) var<storage, read_write> result: array<f32>;
        var<workgroup> numbers: array<f32, 64>;
        fn halved(number: ptr<function, f32>) -> f32 { return 0.5 * *number; }
        @compute @workgroup_size(64)
        fn main(@builtin(local_invocation_index) lane: u32) {
            var own = 1.0;
            numbers[lane] = own + result[lane];
            workgroupBarrier();
            own = numbers[63u - lane];
            result[lane] = halved(&own);
            storageBarrier();
            subgroupBarrier();
            // 264 are the memory semantics of a barrier of workgroup memory
            result[lane + 264u] = 1.0;
        }";

    /// Memory operands of the accesses to shared memory and of the others, and the semantics of
    /// barriers.
    fn accesses(words: &[u32]) -> (Vec<u32>, Vec<u32>, Vec<u32>) {
        let all = instructions(words).unwrap();
        let ids = Ids::of(&all, words[BOUND]);
        let (mut shared, mut own, mut semantics) = (Vec::new(), Vec::new(), Vec::new());
        for Instruction { opcode, operands } in &all {
            if let Some((pointer, memory)) = access(*opcode) {
                let of = if ids.is_shared(operands[pointer]) { &mut shared } else { &mut own };
                of.push(operands.get(memory).copied().unwrap_or(0));
            }
            if let (op::CONSTANT, &[_, id, value]) = (*opcode, *operands)
                && ids.semantics.contains_key(&id)
            {
                semantics.push(value);
            }
        }
        (shared, own, semantics)
    }

    #[test]
    fn accesses_to_shared_memory_are_not_private_and_barriers_make_them_visible() {
        let module = wgsl::parse_str(TEXT).unwrap();
        let info = Validator::new(ValidationFlags::all(), Capabilities::all());
        let info = { info }.validate(&module).unwrap();
        let words = spv::write_vec(&module, &info, &spv::Options::default(), None).unwrap();
        let (shared, own, semantics) = accesses(&words);
        assert!(shared.len() >= 5 && own.len() >= 3 && semantics.len() == 3);
        assert!(shared.iter().chain(&own).all(|&operands| operands == 0));
        assert!(semantics.iter().all(|semantics| semantics & AVAILABLE_AND_VISIBLE == 0));

        let completed = with_shared_memory(&words).unwrap();
        let (shared_after, own_after, semantics_after) = accesses(&completed);
        assert_eq!(shared_after, vec![NON_PRIVATE; shared.len()]);
        assert_eq!(own_after, own);
        let visible: Vec<_> = semantics
            .iter()
            .map(|semantics| match semantics & SUBGROUP_MEMORY {
                0 => semantics | AVAILABLE_AND_VISIBLE,
                _ => semantics | AVAILABLE_AND_VISIBLE | WORKGROUP_MEMORY,
            })
            .collect();
        assert_eq!(semantics_after, visible);
        assert!(semantics.iter().any(|semantics| semantics & SUBGROUP_MEMORY != 0));
        // an index of the same value as semantics is still that
        let constants = |words: &[u32], wanted: u32| {
            instructions(words).unwrap().iter().any(|Instruction { opcode, operands }| {
                *opcode == op::CONSTANT && operands[2] == wanted
            })
        };
        assert!(constants(&words, 264) && constants(&completed, 264));
        assert_eq!(completed[BOUND], words[BOUND] + 3);
        // a completed module is complete
        assert_eq!(accesses(&with_shared_memory(&completed).unwrap()).0, shared_after);
    }

    #[test]
    fn the_probe_of_matrices_is_completed() {
        let source = matrices::probe(Matrices::new(16, 32));
        let translation = translate(&source.wgsl, false).unwrap();
        assert_eq!(translation.workgroup_size, [64, 1, 1]);
        let (shared, _, semantics) = accesses(&translation.spirv);
        assert!(shared.len() > 8 && shared.iter().all(|&operands| operands == NON_PRIVATE));
        assert!(!semantics.is_empty());
        assert!(semantics.iter().all(|of| of & AVAILABLE_AND_VISIBLE == AVAILABLE_AND_VISIBLE));
        let all = instructions(&translation.spirv).unwrap();
        for opcode in [op::COOPERATIVE_MATRIX_LOAD, op::COOPERATIVE_MATRIX_STORE] {
            assert!(all.iter().any(|instruction| instruction.opcode == opcode), "{opcode}");
        }
    }

    #[test]
    fn what_is_no_module_is_an_error() {
        assert!(translate("fn main() { return 1; }", false).is_err());
        assert!(with_shared_memory(&[1, 2]).is_err());
        // an instruction of no words, and one that is cut off
        for first in [op::LOAD, 4 << 16 | op::LOAD] {
            assert!(with_shared_memory(&[0, 0, 0, 1, 0, first, 1]).is_err());
        }
    }
}
