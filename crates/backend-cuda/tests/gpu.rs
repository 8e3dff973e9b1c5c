//! Tests on GPU `ANNULUS_DEVICE`, default 0, of NVIDIA, or with `ANNULUS_GPU=hip` of AMD. Ranks are
//! threads, each with its own stream. A missing GPU is a failure: only `scripts/gpu-check`,
//! `scripts/gpu-lease` and `scripts/amd-lease` run these tests.

mod common;

use std::time::Duration;

use annulus::{Attention, Dims};
use annulus_comm::{
    Deadline,
    nccl::Nccl,
    threads::{self, each_rank},
};
use annulus_conformance::{
    Case, Judge, RankSetup, RingSubject, Setting, Subject,
    suite::{self, Poison, Scale, Verdict},
};
use annulus_core::{DType, Error, Inputs, Outputs, Result, Spec};
use annulus_cuda::{
    Cuda, Level, Variant, compile,
    device::{Architecture, Compiler, CompilerSymbols, CudaTensor, Module},
};
use annulus_plan::Layout;
use half::bf16;

use common::{CudaMemory, DEADLINE, OnMultiplesOfEight, verdicts};

fn gpu() -> impl Subject {
    delayed(Duration::ZERO)
}

/// At the level of any GPU; those of warpgroups have tests of their own.
fn delayed(delay: Duration) -> impl Subject {
    common::staged("cuda over staged threads", delay, || open()?.at_level(Level::Matrix))
}

fn open() -> Result<Cuda> {
    let number = std::env::var("ANNULUS_DEVICE").unwrap_or_else(|_| "0".into());
    let ordinal = number
        .parse()
        .map_err(|_| Error::invalid("ANNULUS_DEVICE", &number, "the number of a GPU"))?;
    if is_amd() { Cuda::open_hip(ordinal) } else { Cuda::open(ordinal) }
}

fn is_amd() -> bool {
    std::env::var_os("ANNULUS_GPU").is_some_and(|gpu| gpu == "hip")
}

verdicts! {
    tiny_random_cases_hold: suite::random_cases(&gpu(), 0..6);
    random_cases_hold: suite::random_cases(&gpu(), 0..400);
    random_cases_hold_for_tensors_in_host_memory:
        suite::random_cases(&common::hosted("hosted cuda over staged threads", open), 400..500);
    a_sample_of_the_matrix_holds: suite::matrix(&gpu(), Scale::OneIn(3));
    awkward_sizes_hold: suite::sizes(&gpu(), Scale::Full);
    the_numeric_rules_hold: suite::numeric_rules(&gpu());
    a_visible_nan_does_not_depend_on_the_ranks: suite::nonfinite(&gpu(), Poison::NanAndInfinities);
    the_metamorphic_relations_hold: suite::independent_rows(&gpu());
    tiny_random_cases_hold_on_warpgroups:
        on_warpgroups(|subject| suite::random_cases(subject, 200..206));
    random_cases_hold_on_warpgroups:
        on_warpgroups(|subject| suite::random_cases(subject, 200..600));
    awkward_sizes_hold_on_warpgroups: on_warpgroups(|subject| suite::sizes(subject, Scale::Full));
    the_numeric_rules_hold_on_warpgroups: on_warpgroups(suite::numeric_rules);
    bits_repeat_on_warpgroups: on_warpgroups(|subject| suite::same_bits_over_repeats(subject, 20));
}

#[test]
fn every_variant_holds() {
    for Variant { dtype, dim, .. } in Variant::all() {
        for (causal, ragged) in [(false, false), (true, false), (false, true), (true, true)] {
            common::wide(&gpu(), dtype, dim, causal, ragged).unwrap();
        }
    }
}

#[test]
fn bits_repeat_under_message_delays() {
    suite::same_bits_over_repeats(&gpu(), 20).unwrap();
    suite::same_bits_under_delay(&gpu(), &delayed(Duration::from_micros(500)), 20).unwrap();
}

/// One rank of a ring over this machine's NCCL.
fn over_nccl(inner: threads::Threads) -> Result<RankSetup<CudaMemory, Cuda>> {
    let backend = open()?;
    let nccl = Nccl::open(inner, backend.stream().device(), DEADLINE)?;
    let memory = CudaMemory(backend.stream().clone());
    Ok(RankSetup { memory, backend, transport: Box::new(Deadline::new(nccl, DEADLINE)?) })
}

#[test]
fn nccl_rings_hold_on_one_rank_and_on_several_if_nccl_permits_them_on_one_gpu() {
    let subject = RingSubject::new("cuda over nccl", |ranks| {
        each_rank(threads::ring(ranks), |_, inner| over_nccl(inner))
    });
    for ranks in [1, 2, 4] {
        for (number, layout) in
            [Layout::Contiguous, Layout::Zigzag, Layout::Striped].into_iter().enumerate()
        {
            let case = Case::random(40 + number as u64).in_dtype(if number == 0 {
                DType::F32
            } else {
                DType::Bf16
            });
            match subject.run(&case, &Setting::new(ranks, layout), 2) {
                Ok(answers) => {
                    Judge::new(&case).unwrap().check(&answers[0]).unwrap();
                    answers[1].same_bits(&answers[0]).unwrap();
                }
                // NCCL may refuse two ranks on one GPU
                Err(error) if ranks > 1 && common::refuses_a_shared_gpu(&error) => {
                    eprintln!("{ranks} ranks on one GPU: {error}")
                }
                Err(error) => panic!("{ranks} ranks: {error}"),
            }
        }
    }
}

#[test]
fn keys_past_two_to_the_31_elements_are_attended_to() {
    let cuda = open().unwrap();
    let dims = Dims { q_len: 64, kv_len: (1 << 31) / 128 + 64, ..Dims::new(1, 64, 1, 128) };
    let stream = cuda.stream();
    let bytes = dims.kv_len * 128 * 2;
    // keys, values, the block into which both are packed, and slack
    let room = 5 * bytes as u64;
    let free = stream.device().free_bytes().unwrap();
    if free < room {
        eprintln!("NOT RUN: keys past 2^31 elements: {free} bytes are free, {room} are needed");
        return;
    }
    // only the last key matters: its score is 42.8, all others are 0
    let tensor = |len: usize, last: &dyn Fn(usize) -> f32| {
        let mut bytes = vec![0; len * 128 * 2];
        for (x, element) in bytes[(len - 1) * 128 * 2..].chunks_exact_mut(2).enumerate() {
            element.copy_from_slice(&bf16::from_f32(last(x)).to_le_bytes());
        }
        CudaTensor::upload(stream, &bytes, DType::Bf16, [1, len, 1, 128]).unwrap()
    };
    let first = |x: usize| if x == 0 { 22.0 } else { 0.0 };
    let (q, k, v) =
        (tensor(64, &first), tensor(dims.kv_len, &first), tensor(dims.kv_len, &|x| x as f32));
    let mut out = CudaTensor::uninitialized(stream, DType::Bf16, [1, 64, 1, 128]).unwrap();
    let mut lse = CudaTensor::uninitialized(stream, DType::F32, [1, 1, 64, 1]).unwrap();
    let attention = Attention::new().dtype(DType::Bf16).forward_only(true);
    let mut ring = common::ring(&cuda, &attention, dims).unwrap();
    let inputs = Inputs::new(q.view(), k.view(), v.view());
    ring.forward(&inputs, &mut Outputs::new(out.view_mut(), lse.view_mut())).unwrap();
    let bytes = out.download().unwrap();
    let last: Vec<f32> = bytes[63 * 128 * 2..]
        .chunks_exact(2)
        .map(|pair| bf16::from_le_bytes([pair[0], pair[1]]).to_f32())
        .collect();
    assert!(last.iter().enumerate().all(|(x, &value)| (value - x as f32).abs() < 0.5), "{last:?}");
}

/// Runs a check at the warpgroup level on compute capability 9.0; elsewhere the level must be
/// refused.
fn on_warpgroups(holds: impl Fn(&dyn Subject) -> Verdict) -> Verdict {
    let cuda = open().map_err(|error| error.to_string())?;
    if cuda.stream().device().gpu().architecture() == Some(Architecture::HOPPER) {
        let make = || open()?.at_level(Level::Warpgroup);
        return holds(&OnMultiplesOfEight(common::staged(
            "cuda on warpgroups over staged threads",
            Duration::ZERO,
            make,
        )));
    }
    match cuda.at_level(Level::Warpgroup) {
        Err(Error::Unsupported { .. }) => Ok(()),
        other => {
            Err(format!("warpgroups elsewhere than on 9.0: {:?}", other.map(|cuda| cuda.level())))
        }
    }
}

/// Writes to an address that is not mapped. AMD's driver may end the process, with an abort.
#[test]
#[ignore = "ends the process: scripts/amd-lease runs it in one of its own"]
fn a_fault_of_the_gpu_is_an_error() {
    #[repr(C)]
    struct Fill {
        at: u64,
        count: u64,
        value: f64,
    }
    let cuda = open().unwrap();
    let device = cuda.stream().device();
    let symbols = CompilerSymbols::system(device.api()).unwrap();
    let compiler = Compiler::with_symbols(symbols, None).unwrap();
    let variant = Variant::of(&Spec::new(Dims::new(1, 8, 1, 64), DType::F32)).unwrap();
    let (kind, target) = compiler.target(device.gpu()).unwrap();
    let image = compile(&compiler, variant, None, kind, &target).unwrap();
    let fill = Module::load(device, &image).unwrap().kernel("fill_sums").unwrap();
    let nowhere = Fill { at: 1 << 46, count: 1, value: 1.0 };
    // SAFETY: the address is not that of any object of this process.
    unsafe { fill.launch(cuda.stream(), [1, 1, 1], 256, &nowhere) }.unwrap();
    let error = cuda.stream().synchronize(Duration::from_secs(20)).unwrap_err();
    assert!(matches!(error, Error::Device { .. }), "{error}");
}

#[test]
fn every_variant_holds_on_warpgroups() {
    let hold = |subject: &dyn Subject, causal| {
        Variant::all().filter(|variant| variant.has_matrix()).try_for_each(
            |Variant { dtype, dim, .. }| common::wide(subject, dtype, dim, causal, false),
        )
    };
    on_warpgroups(|subject| hold(subject, false).and_then(|()| hold(subject, true))).unwrap();
}
