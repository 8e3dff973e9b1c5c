//! `forward_into` and `backward_into` write the caller's tensors, whatever their strides and the
//! layout, and the same bits as the calls that return new tensors.

use annulus::{
    Attention, Backward, BackwardViewMut, Dims, Division, Error, Forward, ForwardViewMut, Layout,
    LocalRing, Plan, Runtime, Setup, SinkShape, Tensors,
    ndarray::{Array2, Array4},
};

const LEN: usize = 60;

fn tensor(heads: usize, step: f64) -> Array4<f64> {
    Array4::from_shape_fn((2, LEN, heads, 8), |(b, i, h, c)| {
        (step * (b * 97 + i * 31 + h * 7 + c) as f64).sin()
    })
}

/// Returns the same numbers in another memory order, in which no vector is contiguous.
fn scattered(tensor: &Array4<f64>) -> Array4<f64> {
    let memory = tensor.view().permuted_axes([0, 2, 3, 1]).as_standard_layout().into_owned();
    memory.permuted_axes([0, 3, 1, 2])
}

#[test]
fn the_callers_tensors_get_the_bits_of_new_ones() {
    let [q, k, v, dout] =
        [(4, 0.3), (2, 0.7), (2, 1.1), (4, 0.9)].map(|(heads, step)| tensor(heads, step));
    let sinks = Array2::from_elem((4, 1), 0.2);
    for (layout, ranks, unnormalized, bias_rows) in [
        (Layout::Contiguous, 1, true, LEN),
        (Layout::Contiguous, 3, false, LEN),
        (Layout::Zigzag, 3, true, LEN),
        (Layout::Striped, 4, false, 1),
    ] {
        let bias = Array4::from_shape_fn((1, 4, bias_rows, LEN), |(_, h, i, j)| {
            ((h + i + 2 * j) as f64).cos()
        });
        let attention = Attention::new()
            .dtype(annulus::DType::F64)
            .causal(true)
            .bias([1, 4, bias_rows, LEN])
            .softmax_aux(SinkShape::per_head(1))
            .unnormalized(unnormalized);
        let setup = (attention, Division::new().layout(layout.clone()));
        let mut ring = LocalRing::new(setup, Dims::new(2, LEN, 4, 8).kv_heads(2), ranks).unwrap();
        let with =
            |q, k, v| Tensors::new(q, k, v).with_bias(bias.view()).with_softmax_aux(sinks.view());
        let tensors = with(q.view(), k.view(), v.view());
        let new = ring.forward(&tensors).unwrap();
        let new_gradients = ring.backward(&tensors, &new, dout.view(), None).unwrap();

        // numbers that must be overwritten
        let [q, k, v] = [&q, &k, &v].map(scattered);
        let strided = with(q.view(), k.view(), v.view());
        let mut got = Forward { out: scattered(&new.out), ..new.clone() };
        got.out.fill(f64::NAN);
        let statistics = [&mut got.max, &mut got.sum, &mut got.ties].into_iter().flatten();
        statistics.chain([&mut got.lse]).for_each(|of| of.fill(f64::NAN));
        let reports = ring.forward_into(&strided, got.view_mut()).unwrap();
        assert_eq!(reports.len(), ranks);
        assert_eq!(got, new, "{layout:?} on {ranks}");
        let [dq, dk, dv] =
            [&q, &k, &v].map(|tensor| scattered(&Array4::from_elem(tensor.raw_dim(), f64::NAN)));
        let mut gradients = Backward { dq, dk, dv, ..new_gradients.clone() };
        gradients.dbias.as_mut().unwrap().fill(f64::NAN);
        gradients.dsoftmax_aux.as_mut().unwrap().fill(f64::NAN);
        let into = gradients.view_mut();
        ring.backward_into(&strided, &got.view(), dout.view(), None, into).unwrap();
        assert_eq!(gradients, new_gradients, "{layout:?} on {ranks}");
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
