//! `forward_into` and `backward_into` write the caller's tensors, whatever their strides and the
//! layout, and the same bits as the calls that return new tensors.

use annulus::{
    Attention, BackwardViewMut, Dims, Division, Error, ForwardView, ForwardViewMut, Layout,
    LocalRing, Plan, Runtime, Setup, SinkShape, Tensors,
    ndarray::{Array2, Array3, Array4, ArrayView4, ArrayViewMut4},
};

const LEN: usize = 60;

fn tensor(heads: usize, step: f64) -> Array4<f64> {
    Array4::from_shape_fn((2, LEN, heads, 8), |(b, i, h, c)| {
        (step * (b * 97 + i * 31 + h * 7 + c) as f64).sin()
    })
}

/// An order of the axes in memory, and the axes of that memory in the order of a tensor.
#[derive(Debug, Clone, Copy)]
struct MemoryOrder {
    axes: [usize; 4],
    inverse: [usize; 4],
}

/// `[batch, heads, len, dim]`, and one in which no vector is contiguous.
const ORDERS: [MemoryOrder; 2] = [
    MemoryOrder { axes: [0, 2, 1, 3], inverse: [0, 2, 1, 3] },
    MemoryOrder { axes: [0, 2, 3, 1], inverse: [0, 3, 1, 2] },
];

impl MemoryOrder {
    /// The same tensor in this order.
    fn of(self, tensor: &Array4<f64>) -> Array4<f64> {
        tensor.view().permuted_axes(self.axes).as_standard_layout().into_owned()
    }

    fn view(self, memory: &Array4<f64>) -> ArrayView4<'_, f64> {
        memory.view().permuted_axes(self.inverse)
    }

    fn view_mut(self, memory: &mut Array4<f64>) -> ArrayViewMut4<'_, f64> {
        memory.view_mut().permuted_axes(self.inverse)
    }
}

#[test]
fn the_callers_tensors_get_the_bits_of_new_ones() {
    let q = tensor(4, 0.3);
    let k = tensor(2, 0.7);
    let v = tensor(2, 1.1);
    let dout = tensor(4, 0.9);
    let sinks = Array2::from_elem((4, 1), 0.2);
    for (unnormalized, bias_rows) in [(false, 1), (false, LEN), (true, LEN)] {
        let bias = Array4::from_shape_fn((1, 4, bias_rows, LEN), |(_, h, i, j)| {
            ((h + i + 2 * j) as f64).cos()
        });
        for (layout, ranks) in [
            (Layout::Contiguous, 1),
            (Layout::Contiguous, 3),
            (Layout::Zigzag, 3),
            (Layout::Striped, 4),
        ] {
            let mut ring = LocalRing::new(
                (
                    Attention::new()
                        .dtype(annulus::DType::F64)
                        .causal(true)
                        .bias([1, 4, bias_rows, LEN])
                        .softmax_aux(SinkShape::per_head(1))
                        .unnormalized(unnormalized),
                    Division::new().layout(layout.clone()),
                ),
                Dims::new(2, LEN, 4, 8).kv_heads(2),
                ranks,
            )
            .unwrap();
            let tensors = Tensors::new(q.view(), k.view(), v.view())
                .with_bias(bias.view())
                .with_softmax_aux(sinks.view());
            let new = ring.forward(&tensors).unwrap();
            let new_gradients = ring.backward(&tensors, &new, dout.view(), None).unwrap();

            // every tensor in another memory order, filled with numbers that must be overwritten
            for order in ORDERS {
                let [q, k, v] = [&q, &k, &v].map(|tensor| order.of(tensor));
                let strided = Tensors::new(order.view(&q), order.view(&k), order.view(&v))
                    .with_bias(bias.view())
                    .with_softmax_aux(sinks.view());
                let junk = |of: &Array4<f64>| Array4::from_elem(of.raw_dim(), f64::NAN);
                let mut out = junk(&q);
                let statistics = || Array3::from_elem((2, 4, LEN), f64::NAN);
                let (mut lse, mut max, mut sum, mut ties) =
                    (statistics(), statistics(), statistics(), statistics());
                let reports = ring
                    .forward_into(
                        &strided,
                        ForwardViewMut {
                            out: order.view_mut(&mut out),
                            lse: lse.view_mut(),
                            max: Some(max.view_mut()),
                            sum: Some(sum.view_mut()),
                            ties: unnormalized.then(|| ties.view_mut()),
                            out_residual: None,
                            statistics: None,
                            head_statistics: None,
                        },
                    )
                    .unwrap();
                assert_eq!(reports.len(), ranks);
                assert_eq!(
                    (order.view(&out), &lse),
                    (new.out.view(), &new.lse),
                    "{layout:?} {order:?}"
                );
                assert_eq!((Some(&max), Some(&sum)), (new.max.as_ref(), new.sum.as_ref()));
                let mut dq = junk(&q);
                let mut dk = junk(&k);
                let mut dv = junk(&v);
                let mut dbias = Array4::from_elem(bias.raw_dim(), f64::NAN);
                let mut dsinks = Array2::from_elem((4, 1), f64::NAN);
                let forward = ForwardView {
                    out: order.view(&out),
                    lse: lse.view(),
                    max: Some(max.view()),
                    sum: Some(sum.view()),
                    ties: unnormalized.then(|| ties.view()),
                    out_residual: None,
                };
                let gradients = BackwardViewMut {
                    dq: order.view_mut(&mut dq),
                    dk: order.view_mut(&mut dk),
                    dv: order.view_mut(&mut dv),
                    dbias: Some(dbias.view_mut()),
                    dsoftmax_aux: Some(dsinks.view_mut()),
                };
                ring.backward_into(&strided, &forward, dout.view(), None, gradients).unwrap();
                assert_eq!(order.view(&dq), new_gradients.dq, "{layout:?} on {ranks}, {order:?}");
                assert_eq!(order.view(&dk), new_gradients.dk);
                assert_eq!(order.view(&dv), new_gradients.dv);
                assert_eq!(Some(dbias), new_gradients.dbias);
                assert_eq!(Some(dsinks), new_gradients.dsoftmax_aux);
            }
        }
    }
}

/// dbias is that of a bias which was not declared: its rows are dealt to the ranks, so the ring must
/// refuse it before the ranks start.
#[test]
fn outputs_that_do_not_fit_are_refused_by_name_and_the_plan_still_works() {
    let x = tensor(2, 0.3);
    let tensors = Tensors::new(x.view(), x.view(), x.view());
    for layout in [Layout::Contiguous, Layout::Zigzag] {
        let attention = Attention::new().dtype(annulus::DType::F64);
        let setup = (attention, Division::new().layout(layout.clone()));
        let mut ring = LocalRing::new(setup, Dims::new(2, LEN, 2, 8), 3).unwrap();
        let forward = ring.forward(&tensors).unwrap();
        let mut good = forward.clone();
        let mut gradients = ring.backward(&tensors, &forward, x.view(), None).unwrap();
        let mut short = Array4::zeros((2, LEN - 1, 2, 8));
        let mut extra = good.lse.clone();
        let mut dbias = Array4::zeros((2, 4, 4, 8));
        let outputs = ForwardViewMut { out: short.view_mut(), ..good.view_mut() };
        let of_out = ring.forward_into(&tensors, outputs).map(drop);
        let outputs = ForwardViewMut { ties: Some(extra.view_mut()), ..good.view_mut() };
        let of_ties = ring.forward_into(&tensors, outputs).map(drop);
        let outputs = ForwardViewMut { sum: None, ..good.view_mut() };
        let of_sum = ring.forward_into(&tensors, outputs).map(drop);
        let outputs = BackwardViewMut { dbias: Some(dbias.view_mut()), ..gradients.view_mut() };
        let view = forward.view();
        let of_dbias = ring.backward_into(&tensors, &view, x.view(), None, outputs).map(drop);
        for (name, refused) in
            [("out", of_out), ("ties", of_ties), ("sum", of_sum), ("dbias", of_dbias)]
        {
            let error = refused.expect_err(name);
            let named =
                matches!(&error, Error::InvalidArgument { argument, .. } if argument == name);
            assert!(named, "{name}: {error}");
        }
        assert!(ring.forward(&tensors).is_ok());
    }
}

#[test]
fn threads_are_those_of_a_backend_that_is_given() {
    let dims = Dims::new(1, 8, 1, 4);
    let setup = Setup::from((Attention::new(), Division::new(), Runtime::new().threads(2)));
    let own = LocalRing::from_plans(setup, dims, 2, |_, setup, endpoint| {
        Plan::with_backend(setup, dims, annulus::backend::Cpu::new(1)?, endpoint)
    });
    assert!(matches!(own, Err(Error::InvalidArgument { argument, .. }) if argument == "threads"));
}

#[test]
fn a_block_size_changes_messages_and_no_result() {
    let q = tensor(2, 0.3);
    let tensors = Tensors::new(q.view(), q.view(), q.view());
    let dims = Dims::new(2, LEN, 2, 8);
    let attention = Attention::new().dtype(annulus::DType::F64);
    let contiguous = Division::new().layout(Layout::Contiguous);
    let outputs = |size: Option<u64>| {
        let division = contiguous.clone().kv_block_size(size);
        let mut ring = LocalRing::new((&attention, division), dims, 2).unwrap();
        let forward = ring.forward(&tensors).unwrap();
        let gradients = ring.backward(&tensors, &forward, q.view(), None).unwrap();
        (forward.out, gradients.dq, gradients.dk)
    };
    // a tile holds the whole block, which by default travels in parts of less than a tile
    let one_part = outputs(Some(1));
    assert_eq!(outputs(Some(u64::MAX)), one_part);
    let default = outputs(None);
    assert_ne!(one_part.0, default.0, "the order of sums is another");
    let pairs = [(&one_part.0, &default.0), (&one_part.1, &default.1), (&one_part.2, &default.2)];
    assert!(pairs.iter().all(|(a, b)| (*a - *b).iter().all(|difference| difference.abs() < 1e-13)));
    let refused =
        LocalRing::new((&attention, Division::new().kv_block_size(0)), dims, 2).unwrap_err();
    assert!(refused.to_string().contains("kv_block_size"), "{refused}");
}

#[test]
fn a_ring_displays_its_mask_ranks_layout_and_route() {
    let ring = LocalRing::new(
        (Attention::new().causal(true), Division::new().layout(Layout::Zigzag)),
        Dims::new(1, 1024, 2, 16),
        4,
    )
    .unwrap();
    assert_eq!(
        ring.to_string(),
        "Causal { offset: 0 }, 4 ranks, zigzag, relay-down, 3 hops, 96.0 KiB sent forward, \
         288.0 KiB backward"
    );
}
