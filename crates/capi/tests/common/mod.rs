//! Calls of the C interface, and the facade's answers to compare them with; programs of C, compiled
//! against the library that a test was built with.
#![allow(dead_code, reason = "every test uses a part")]

use std::{
    ffi::CStr,
    fs, mem,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::Command,
    ptr,
};

use annulus::{
    Backward, Batch, DType, Dims, Element, Forward, LocalRing, Setup, Tensors,
    ndarray::{Array, Array4, Dimension},
};
use annulus_capi::*;

/// A folder that is removed in the end, with the library under its installed names.
pub(crate) struct Workspace {
    folder: PathBuf,
}

impl Workspace {
    pub(crate) fn new(name: &str) -> Self {
        let folder =
            Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let library = library();
        for link in ["libannulus.so", "libannulus.so.1"] {
            symlink(&library, folder.join(link)).unwrap();
        }
        Self { folder }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// Compiles a program, without a warning.
    pub(crate) fn compile(&self, source: &Path) -> PathBuf {
        let crate_folder = Path::new(env!("CARGO_MANIFEST_DIR"));
        let program = self.path(source.file_stem().unwrap().to_str().unwrap());
        run(Command::new("cc")
            .args(["-std=c11", "-Wall", "-Wextra", "-Werror", "-g", "-O1", "-o"])
            .arg(&program)
            .arg(source)
            .arg("-I")
            .arg(crate_folder.join("include"))
            .arg("-I")
            .arg(crate_folder.join("tests/c"))
            .arg("-L")
            .arg(&self.folder)
            .args(["-lannulus", "-lm"]));
        program
    }

    /// A command that finds the library.
    pub(crate) fn command(&self, program: &Path) -> Command {
        let mut command = Command::new(program);
        command.env("LD_LIBRARY_PATH", &self.folder);
        command
    }
}

impl Drop for Workspace {
    fn drop(&mut self) {
        // it lies in the target folder: what stays behind harms nobody
        let removed = fs::remove_dir_all(&self.folder);
        drop(removed);
    }
}

/// The shared library, beside this test.
pub(crate) fn library() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let library = test.parent().unwrap().join("libannulus_capi.so");
    assert!(library.exists(), "no {}", library.display());
    library
}

/// Runs a command and returns what it wrote to stdout; panics with all it wrote if it fails.
pub(crate) fn run(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(
        output.status.success(),
        "{command:?}: {}\n{}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout).unwrap()
}

/// Returns the message of the last error of this thread.
pub(crate) fn last_error() -> String {
    // SAFETY: never NULL, ends with a zero byte, and nothing fails on this thread meanwhile
    unsafe { CStr::from_ptr(annulus_last_error()) }.to_str().unwrap().to_owned()
}

pub(crate) fn ok(status: i32) {
    assert_eq!(status, ANNULUS_SUCCESS, "{}", last_error());
}

/// `value` of `case.h`.
pub(crate) fn value(salt: usize, [b, row, head, c]: [usize; 4]) -> f32 {
    ((row * 31 + head * 7 + c * 3 + b * 5 + salt * 11) % 17) as f32 / 8.0 - 1.0
}

/// q, k, v and dout of some rows, of the numbers of [`value`].
pub(crate) struct PassInputs<T: Element> {
    pub(crate) q: Array4<T>,
    pub(crate) k: Array4<T>,
    pub(crate) v: Array4<T>,
    pub(crate) dout: Array4<T>,
}

impl<T: Element> PassInputs<T> {
    /// The tensors of some rows.
    pub(crate) fn of(dims: Dims, rows: &[i64]) -> Self {
        let Dims { batch, q_heads, kv_heads, head_dim, value_dim, .. } = dims;
        let numbers = |salt, heads, dim| {
            Array4::from_shape_fn((batch, rows.len(), heads, dim), |(b, i, head, c)| {
                T::from_f64(value(salt, [b, rows[i] as usize, head, c]).into())
            })
        };
        Self {
            q: numbers(1, q_heads, head_dim),
            k: numbers(2, kv_heads, head_dim),
            v: numbers(3, kv_heads, value_dim),
            dout: numbers(4, q_heads, value_dim),
        }
    }

    /// The tensors of all rows.
    pub(crate) fn all(dims: Dims) -> Self {
        Self::of(dims, &(0..dims.q_len as i64).collect::<Vec<_>>())
    }

    pub(crate) fn tensors(&self) -> Tensors<'_, T> {
        Tensors::new(self.q.view(), self.k.view(), self.v.view())
    }

    /// Computes both passes by the facade, with one thread for each rank.
    pub(crate) fn by_facade(
        &self,
        setup: impl Into<Setup>,
        dims: Dims,
        ranks: usize,
        batch: &Batch,
    ) -> (Forward<T>, Backward<T>) {
        let setup = setup.into().map_attention(|attention| attention.dtype(T::DTYPE));
        let setup = setup.map_runtime(|runtime| runtime.threads(1));
        let mut ring = LocalRing::new(setup, dims, ranks).unwrap();
        ring.update(batch).unwrap();
        let forward = ring.forward(&self.tensors()).unwrap();
        let gradients = ring.backward(&self.tensors(), &forward, self.dout.view(), None).unwrap();
        (forward, gradients)
    }
}

pub(crate) fn tensor<T: Element, D: Dimension>(array: &Array<T, D>) -> annulus_tensor {
    let dtype = match T::DTYPE {
        DType::F32 => ANNULUS_F32,
        DType::F64 => ANNULUS_F64,
        DType::F16 => ANNULUS_F16,
        DType::Bf16 => ANNULUS_BF16,
    };
    described(array, dtype)
}

pub(crate) fn described<T, D: Dimension>(array: &Array<T, D>, dtype: i32) -> annulus_tensor {
    let (mut dims, mut strides) = ([1; 4], [0; 4]);
    for (axis, (&len, &stride)) in array.shape().iter().zip(array.strides()).enumerate() {
        dims[axis] = len as i64;
        strides[axis] = stride as i64;
    }
    annulus_tensor { data: array.as_ptr().cast_mut().cast(), dtype, dims, strides }
}

/// The tensor that there may be, or NULL.
pub(crate) fn pointer(tensor: Option<&annulus_tensor>) -> *const annulus_tensor {
    tensor.map_or(ptr::null(), ptr::from_ref)
}

/// The defaults of all options, for tensors of these lengths.
pub(crate) fn options(dims: Dims) -> annulus_options {
    let mut options = mem::MaybeUninit::<annulus_options>::uninit();
    // SAFETY: as many writable bytes as said, all of which it sets
    let mut options = unsafe {
        ok(annulus_options_init(options.as_mut_ptr(), size_of::<annulus_options>() as u64));
        options.assume_init()
    };
    let Dims { batch, q_len, kv_len, q_heads, kv_heads, head_dim, value_dim } = dims;
    [options.batch, options.q_len, options.kv_len] = [batch, q_len, kv_len].map(|n| n as i64);
    [options.q_heads, options.kv_heads] = [q_heads, kv_heads].map(|n| n as i64);
    [options.head_dim, options.value_dim] = [head_dim, value_dim].map(|n| n as i64);
    options
}

pub(crate) fn attention(options: &annulus_options) -> *mut annulus_attention {
    let mut attention = ptr::null_mut();
    // SAFETY: pointers to locals
    ok(unsafe { annulus_attention_create(options, &raw mut attention) });
    attention
}

/// Plans an in-process ring.
pub(crate) fn plan_of_threads(options: &annulus_options, ranks: usize) -> *mut annulus_plan {
    let (attention, mut plan) = (attention(options), ptr::null_mut());
    // SAFETY: pointers to locals
    ok(unsafe { annulus_plan_create_threads(attention, ranks as i64, &raw mut plan) });
    // the plan lives on
    ok(annulus_attention_destroy(attention));
    plan
}

/// Returns the query rows of a plan.
pub(crate) fn rows(plan: *mut annulus_plan) -> Vec<i64> {
    let mut count = 0;
    // SAFETY: pointers to locals, and as many numbers as said
    unsafe {
        ok(annulus_plan_q_rows(plan, ptr::null_mut(), 0, &raw mut count));
        let mut rows = vec![0; count as usize];
        ok(annulus_plan_q_rows(plan, rows.as_mut_ptr(), count, &raw mut count));
        rows
    }
}

pub(crate) fn batch() -> annulus_batch {
    // SAFETY: pointers may be null
    let batch: annulus_batch = unsafe { mem::zeroed() };
    annulus_batch { struct_size: size_of::<annulus_batch>() as u64, ..batch }
}

/// Arguments of both passes; optional tensors are NULL.
pub(crate) fn args(
    [q, k, v, dout]: [&annulus_tensor; 4],
    [out, lse]: [&annulus_tensor; 2],
    [dq, dk, dv]: [&annulus_tensor; 3],
) -> (annulus_forward_args, annulus_backward_args) {
    // SAFETY: pointers may be null
    let (forward, backward): (annulus_forward_args, annulus_backward_args) =
        unsafe { mem::zeroed() };
    let struct_size = size_of::<annulus_forward_args>() as u64;
    let forward = annulus_forward_args { struct_size, q, k, v, out, lse, ..forward };
    let struct_size = size_of::<annulus_backward_args>() as u64;
    let backward = annulus_backward_args { struct_size, q, k, v, out, lse, dout, ..backward };
    (forward, annulus_backward_args { dq, dk, dv, ..backward })
}
