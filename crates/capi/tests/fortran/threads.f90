! threads RANKS FILE: the case of tests/c/case.h by the Fortran module; and its errors and functions.
! threads RANKS FILE MACHINE: decoding; a plan takes the strategy of the least time on MACHINE. The
! results go to FILE.
module functions_of_host
  use, intrinsic :: iso_c_binding
  use annulus
  implicit none
  integer(c_int64_t), target :: width = 3

contains

  ! A window of `width` keys before the query.
  function in_window(context, pair) bind(c) result(visible)
    type(c_ptr), value :: context, pair
    integer(c_int32_t) :: visible
    type(annulus_pair), pointer :: of
    integer(c_int64_t), pointer :: most
    call c_f_pointer(pair, of)
    call c_f_pointer(context, most)
    visible = 0
    if (of%kv_position <= of%q_position .and. of%q_position - of%kv_position <= most) visible = 1
  end function in_window

  function no_bias(context, pair) bind(c) result(bias)
    type(c_ptr), value :: context, pair
    real(c_double) :: bias
    bias = 0
    if (c_associated(context) .or. .not. c_associated(pair)) bias = 1000
  end function no_bias

  ! Adds the bytes of an event to those of its rank.
  subroutine add_bytes(context, event) bind(c)
    type(c_ptr), value :: context, event
    type(annulus_step_event), pointer :: of
    integer(c_int64_t), pointer :: sent(:)
    call c_f_pointer(event, of)
    call c_f_pointer(context, sent, [of%rank + 1])
    sent(of%rank + 1) = sent(of%rank + 1) + of%bytes
  end subroutine add_bytes
end module functions_of_host

! Decoding with an in-process KV cache as tests/c/threads.c does it.
module decoding
  use case_of_tests
  implicit none

contains

  subroutine decode_and_compare(ranks, path, machine)
    integer(c_int64_t), intent(in) :: ranks
    character(len=*), intent(in) :: path, machine
    integer(c_int64_t) :: count
    real(c_float) :: out(value_dim, q_heads, length, batch), lse(length, q_heads, batch)
    real(c_float) :: again(value_dim, q_heads, length, batch), again_lse(length, q_heads, batch)
    real(c_double) :: out64(value_dim, q_heads, length, batch), lse64(length, q_heads, batch)
    real(c_double) :: sinks(2, 1)
    type(annulus_options) :: options
    type(c_ptr) :: attention, decoder
    integer :: unit

    options = options_of_cache()
    call ok(annulus_attention_create(options, attention))
    call ok(annulus_cache_create_threads(attention, ranks, decoder))
    call ok(annulus_attention_destroy(attention))
    call ok(annulus_cache_ranks(decoder, count))
    call check(count == ranks, 'ranks')
    call ok(annulus_cache_rank(decoder, count))
    call check(count == 0, 'rank')
    call ok(annulus_cache_page_rows(decoder, count))
    call check(count == 4, 'rows of a page')
    call decode(decoder, out, lse)
    call ok(annulus_cache_local_len(decoder, count))
    call check(count == length, 'local rows')
    call ok(annulus_cache_predicted_bytes(decoder, 1_c_int64_t, count))
    call check(count == ranks*(ranks - 1)*batch*q_heads*(value_dim + 2)*4, 'predicted bytes')
    call ok(annulus_cache_buffer_bytes(decoder, count))
    call check(count >= length*batch*kv_heads*(head_dim + value_dim)*4, 'bytes of buffers')

    ! bad arguments are named, and change nothing
    call check(annulus_cache_truncate(decoder, length + 1_c_int64_t) == ANNULUS_INVALID_ARGUMENT, &
               'truncate beyond the length')
    call check(index(annulus_message(), 'len: got 38, want at most the 37') == 1, 'named length')
    call check(annulus_cache_append(decoder, out, out) == ANNULUS_INVALID_ARGUMENT, 'a wrong shape')
    call check(index(annulus_message(), 'k: got') == 1, 'named tensor')
    call ok(annulus_cache_truncate(decoder, 0_c_int64_t))
    call decode(decoder, again, again_lse)
    call check(all(again == out) .and. all(again_lse == lse), 'the same bits again')
    call ok(annulus_cache_destroy(decoder))
    call check(annulus_cache_destroy(decoder) == ANNULUS_INVALID_ARGUMENT, 'double destroy')

    ! double precision, with sinks
    options%dtype = ANNULUS_F64
    call ok(annulus_attention_create(options, attention))
    call ok(annulus_cache_create_threads(attention, ranks, decoder))
    call ok(annulus_attention_destroy(attention))
    call decode64(decoder, out64, lse64)
    call check(maxval(abs(out64 - out)) < 1e-5 .and. any(out64 /= out), 'double precision')
    call ok(annulus_cache_destroy(decoder))
    options%sinks = 2
    call ok(annulus_attention_create(options, attention))
    call ok(annulus_cache_create_threads(attention, ranks, decoder))
    call ok(annulus_attention_destroy(attention))
    sinks = 0.5
    call decode64(decoder, out64, lse64, sinks)
    call check(all(lse64 > lse), 'sinks')
    call ok(annulus_cache_destroy(decoder))

    call plan_by_machine(machine)
    open (newunit=unit, file=path, access='stream', form='unformatted', status='replace')
    write (unit) out, lse
    close (unit)
  end subroutine decode_and_compare

  ! A prefill of 30 rows, then tokens.
  subroutine decode64(decoder, out, lse, sinks)
    type(c_ptr), intent(in) :: decoder
    real(c_double), intent(inout) :: out(:, :, :, :), lse(:, :, :)
    real(c_double), intent(in), optional :: sinks(:, :)
    integer(c_int64_t) :: first, last, i
    integer(c_int64_t), allocatable :: rows(:)
    first = 0
    do while (first < length)
      last = max(first, 29_c_int64_t)
      allocate (rows(last - first + 1))
      rows = [(i, i=first, last)]
      call ok(annulus_cache_append(decoder, real(numbers(2, rows, kv_heads, head_dim), c_double), &
                                   real(numbers(3, rows, kv_heads, value_dim), c_double)))
      call ok(annulus_cache_attend(decoder, real(numbers(1, rows, q_heads, head_dim), c_double), &
                                   out(:, :, first + 1:last + 1, :), &
                                   lse(first + 1:last + 1, :, :), sinks))
      deallocate (rows)
      first = last + 1
    end do
  end subroutine decode64

  ! Two nodes of two ranks with a slow network: the ranks of a node divide the keys.
  subroutine plan_by_machine(machine)
    character(len=*), intent(in) :: machine
    type(annulus_options) :: options
    type(c_ptr) :: attention, plan
    integer(c_int32_t) :: strategy, heads, queries, keys
    options = options_of_case()
    options%strategy = ANNULUS_STRATEGY_AUTO
    options%batch = 1
    options%q_len = 64
    options%kv_len = 64
    options%kv_heads = 1
    options%value_dim = head_dim
    options%causal = 0
    call ok(annulus_attention_create(options, attention))
    call check(annulus_attention_set_machine(attention, 'none.json') == ANNULUS_IO, 'no file')
    call check(index(annulus_message(), 'none.json: ') == 1, 'named file')
    call ok(annulus_attention_set_machine(attention, machine))
    call ok(annulus_plan_create_threads(attention, 4_c_int64_t, plan))
    call ok(annulus_plan_strategy(plan, strategy, heads))
    call ok(annulus_plan_grid(plan, queries, keys))
    call check(strategy == ANNULUS_STRATEGY_GRID .and. heads == 1, 'strategy by machine')
    call check(queries == 2 .and. keys == 2, 'grid by machine')
    call ok(annulus_plan_destroy(plan))
    call ok(annulus_attention_destroy(attention))
  end subroutine plan_by_machine
end module decoding

program threads
  use case_of_tests
  use decoding
  use functions_of_host
  implicit none
  character(len=1000) :: ranks_text, path, machine
  character(len=40) :: grid
  character(len=:), allocatable :: numerics
  integer(c_int64_t) :: ranks, count, i
  integer(c_int64_t), target :: sent(8)
  integer(c_int32_t) :: layout, done, strategy, heads
  type(annulus_tensor), target :: tensors(5)
  type(annulus_forward_args) :: arguments
  type(annulus_options) :: options
  type(c_ptr) :: attention, plan, masked, windowed
  real(c_float), target, asynchronous :: out(value_dim, q_heads, length, batch)
  real(c_float), target, asynchronous :: lse(length, q_heads, batch)
  real(c_float), target :: dq(head_dim, q_heads, length, batch)
  real(c_float), target :: dk(head_dim, kv_heads, length, batch)
  real(c_float), target :: dv(value_dim, kv_heads, length, batch)
  real(c_float), target :: by_mask(value_dim, q_heads, length, batch)
  real(c_float), target :: by_window(value_dim, q_heads, length, batch)
  real(c_float), allocatable, target, asynchronous :: q(:, :, :, :), k(:, :, :, :), v(:, :, :, :)
  real(c_float), allocatable, target :: wide(:, :, :, :)
  real(c_float), allocatable, target :: outs(:, :, :, :, :), lses(:, :, :)
  real(c_double), allocatable :: q64(:, :, :, :), k64(:, :, :, :), v64(:, :, :, :)
  real(c_double), allocatable :: out64(:, :, :, :), lse64(:, :, :)
  integer(c_int32_t), target :: ids(length, batch)
  real(c_double) :: of_pairs(length)
  integer(c_int64_t), allocatable :: rows(:), other_rows(:)
  integer(c_int64_t), target :: starts(3)

  call get_command_argument(1, ranks_text)
  call get_command_argument(2, path)
  read (ranks_text, *) ranks
  if (command_argument_count() == 3) then
    call get_command_argument(3, machine)
    call decode_and_compare(ranks, trim(path), trim(machine))
    stop
  end if
  call check(len(annulus_version_text()) > 0, 'a version')
  options = options_of_case()
  call ok(annulus_attention_create(options, attention))
  call ok(annulus_plan_create_threads(attention, ranks, plan))
  call ok(annulus_plan_ranks(plan, count))
  call check(count == ranks, 'ranks')
  call run(plan, out, lse, dq, dk, dv)
  call write_results(trim(path), out, lse, dq, dk, dv)

  ! an array section of every second head is read and written in place
  q = numbers(1, [(i, i=0, length - 1)], q_heads, head_dim)
  k = numbers(2, [(i, i=0, length - 1)], kv_heads, head_dim)
  v = numbers(3, [(i, i=0, length - 1)], kv_heads, value_dim)
  allocate (wide(value_dim, 2*q_heads, length, batch))
  wide = -7
  call ok(annulus_forward(plan, q, k, v, wide(:, 2::2, :, :), lse))
  call check(all(wide(:, 2::2, :, :) == out) .and. all(wide(:, 1::2, :, :) == -7), 'a section')

  ! strides are in elements, and an empty array has no address
  tensors(1) = annulus_tensor_of(wide(::2, :, 3:1:-1, 1))
  call check(all(tensors(1)%dims == [3, 2*q_heads, value_dim/2, 1]), 'lengths in reverse')
  call check(all(tensors(1)%strides(:3) == [-2*value_dim*q_heads, value_dim, 2]), 'strides')
  tensors(1) = annulus_tensor_of(wide(:, :, 1:0, :))
  call check(.not. c_associated(tensors(1)%data) .and. tensors(1)%dtype == ANNULUS_F32, 'empty')

  ! a pass on a thread of its own
  out = -7
  tensors = [annulus_tensor_of(q), annulus_tensor_of(k), annulus_tensor_of(v), &
             annulus_tensor_of(out), annulus_tensor_of(lse)]
  arguments%struct_size = int(c_sizeof(arguments), c_int64_t)
  arguments%q = c_loc(tensors(1))
  arguments%k = c_loc(tensors(2))
  arguments%v = c_loc(tensors(3))
  arguments%out = c_loc(tensors(4))
  arguments%lse = c_loc(tensors(5))
  call ok(annulus_forward_start(plan, arguments))
  done = 0
  do while (done == 0)
    call ok(annulus_plan_test(plan, done))
  end do
  call check(all(wide(:, 2::2, :, :) == out), 'a pass that was started')
  call ok(annulus_forward_start(plan, arguments))
  call ok(annulus_plan_wait(plan))

  ! errors name what they refuse
  call check(annulus_forward(plan, q, k, k, out, lse) == ANNULUS_INVALID_ARGUMENT, 'refused')
  call check(index(annulus_message(), 'v: got') == 1, 'named')
  call check(annulus_forward(plan, q, k, v, out, lse(length:1:-1, :, :)) &
             == ANNULUS_INVALID_ARGUMENT, 'a negative stride')
  call check(index(annulus_message(), 'lse.strides') == 1, 'named stride')

  ! every row a sequence of its own: out is v
  do i = 1, length
    ids(i, :) = int(i, c_int32_t)
  end do
  call ok(annulus_plan_update(plan, q_segment_ids=ids))
  call ok(annulus_forward(plan, q, k, v, out, lse))
  call check(all(out(:, 1, :, :) == v(:, 1, :, :)), 'rows that attend to themselves')

  ! the same by key lists, also with a number a pair; a key that does not exist
  call ok(annulus_plan_update(plan, &
    key_list_offsets=reshape([(int(i, c_int64_t), i = 0, length)], [length + 1, 1, 1]), &
    key_list_indices=[(int(i, c_int64_t), i = 0, length - 1)], &
    key_list_bias=[(0.5_c_double, i = 1, length)]))
  call ok(annulus_forward(plan, q, k, v, out, lse))
  call check(all(out(:, 1, :, :) == v(:, 1, :, :)), 'lists of the own row')
  call check(annulus_plan_list_bias_gradient(plan, of_pairs) == ANNULUS_SUCCESS, 'list bias')
  call check(annulus_plan_update(plan, &
    key_list_offsets=reshape([(int(i, c_int64_t), i = 0, length)], [length + 1, 1, 1]), &
    key_list_indices=[(int(i, c_int64_t), i = 1, length)]) == ANNULUS_INVALID_ARGUMENT, 'no key')
  call check(index(annulus_message(), 'key_lists: got row') == 1, 'named row')
  call ok(annulus_plan_update(plan))
  call ok(annulus_plan_destroy(plan))
  call check(annulus_plan_destroy(plan) == ANNULUS_INVALID_ARGUMENT, 'double destroy')
  call ok(annulus_attention_destroy(attention))

  ! functions of the host: a window by callback is a window on a grid of one axis, in boxes
  options%causal = 0
  call ok(annulus_attention_create(options, attention))
  call ok(annulus_attention_add_mask(attention, 'window of 3', 0_c_int32_t, c_funloc(in_window), &
                                     c_loc(width)))
  call ok(annulus_attention_set_bias_function(attention, 'none', c_funloc(no_bias), c_null_ptr))
  call ok(annulus_plan_create_threads(attention, ranks, masked))
  call ok(annulus_attention_destroy(attention))
  options%layout = ANNULUS_LAYOUT_CUSTOM
  call ok(annulus_attention_create(options, attention))
  write (grid, '(i0, a)') options%kv_len, ':3+0:edge=clip'
  call ok(annulus_attention_add_neighborhood(attention, trim(grid)))
  call ok(annulus_attention_set_boxes_layout(attention, ranks, [options%kv_len]))
  call ok(annulus_attention_on_step(attention, c_funloc(add_bytes), c_loc(sent)))
  call ok(annulus_plan_create_threads(attention, ranks, windowed))
  call ok(annulus_attention_destroy(attention))
  call ok(annulus_forward(masked, q, k, v, by_mask, lse))
  sent = 0
  call ok(annulus_forward(windowed, q, k, v, by_window, lse))
  call ok(annulus_plan_predicted_bytes(windowed, ANNULUS_PASS_FORWARD, count))
  call check(sum(sent) == count, 'bytes of events')
  call check(maxval(abs(by_mask - by_window)) < 1e-5, 'a mask of the host is a window')
  call check(any(by_mask /= out), 'which has an effect')
  call ok(annulus_plan_destroy(masked))
  call ok(annulus_plan_destroy(windowed))

  ! all-to-all over heads: other sums, the same result
  if (ranks > 1 .and. mod(int(q_heads, c_int64_t), ranks) == 0) then
    options = options_of_case()
    options%strategy = ANNULUS_STRATEGY_HEADS_RING
    options%strategy_heads = int(ranks, c_int32_t)
    call ok(annulus_attention_create(options, attention))
    call ok(annulus_plan_create_threads(attention, ranks, plan))
    call ok(annulus_plan_strategy(plan, strategy, heads))
    call check(strategy == ANNULUS_STRATEGY_HEADS_RING .and. heads == ranks, 'strategy')
    out = -7
    call ok(annulus_forward(plan, q, k, v, out, lse))
    call check(maxval(abs(out - wide(:, 2::2, :, :))) < 1e-5, 'all-to-all over heads')
    call ok(annulus_plan_destroy(plan))
    call ok(annulus_attention_destroy(attention))
  end if

  ! double precision
  options = options_of_case()
  options%dtype = ANNULUS_F64
  options%layout = ANNULUS_LAYOUT_CONTIGUOUS
  call ok(annulus_attention_create(options, attention))
  call ok(annulus_plan_create_threads(attention, ranks, plan))
  call ok(annulus_plan_layout(plan, layout))
  call check(layout == ANNULUS_LAYOUT_CONTIGUOUS, 'layout')
  call ok(annulus_plan_numerics(plan, numerics))
  call check(index(numerics, 'cpu ') == 1 .and. len(numerics) > 4, 'numerics')
  call check(annulus_plan_numerics(c_null_ptr, numerics) == ANNULUS_INVALID_ARGUMENT, 'no plan')
  call check(len(numerics) == 0, 'no numerics')
  q64 = real(q, c_double)
  k64 = real(k, c_double)
  v64 = real(v, c_double)
  allocate (out64(value_dim, q_heads, length, batch), lse64(length, q_heads, batch))
  call ok(annulus_forward(plan, q64, k64, v64, out64, lse64))
  call ok(annulus_plan_destroy(plan))
  call ok(annulus_attention_destroy(attention))
  options%dtype = ANNULUS_F32
  call ok(annulus_attention_create(options, attention))
  call ok(annulus_plan_create_threads(attention, ranks, plan))
  call ok(annulus_forward(plan, q, k, v, out, lse))
  call check(maxval(abs(out64 - out)) < 1e-5 .and. any(out64 /= out), 'double precision')
  call ok(annulus_plan_destroy(plan))
  call ok(annulus_attention_destroy(attention))

  ! the rows of the ranks before there is a plan, for two documents
  options%layout = ANNULUS_LAYOUT_BALANCED
  starts = [0_c_int64_t, 20_c_int64_t, int(length, c_int64_t)]
  call ok(annulus_attention_create(options, attention))
  call ok(annulus_attention_set_balanced_layout(attention, 2_c_int64_t, cum_seqlens_q=starts))
  call ok(annulus_attention_q_rows(attention, 2_c_int64_t, 0_c_int64_t, rows))
  call ok(annulus_attention_kv_rows(attention, 2_c_int64_t, 1_c_int64_t, other_rows))
  call check(size(rows) + size(other_rows) == length, 'rows of the ranks')
  call check(all([(any(rows == i) .neqv. any(other_rows == i), i=0, length - 1)]), 'each row')
  call check(annulus_attention_q_rows(attention, 2_c_int64_t, 2_c_int64_t, rows) &
             == ANNULUS_INVALID_ARGUMENT, 'no such rank')
  call ok(annulus_plan_create_threads(attention, 2_c_int64_t, plan))
  call ok(annulus_plan_update(plan, cum_seqlens_q=starts))
  call ok(annulus_forward(plan, q, k, v, out, lse))
  call check(all(out(:, 1, 21, :) == v(:, 1, 21, :)), 'the first row of a document')
  call ok(annulus_plan_destroy(plan))
  call ok(annulus_attention_destroy(attention))

  ! the reproducible order: the same bits on one rank and on three
  options%q_len = 700
  options%kv_len = 700
  options%layout = ANNULUS_LAYOUT_AUTO
  options%reproducible = 1
  q = numbers(1, [(i, i=0, 699)], q_heads, head_dim)
  k = numbers(2, [(i, i=0, 699)], kv_heads, head_dim)
  v = numbers(3, [(i, i=0, 699)], kv_heads, value_dim)
  allocate (outs(value_dim, q_heads, 700, batch, 2), lses(700, q_heads, batch))
  do i = 1, 2
    call ok(annulus_attention_create(options, attention))
    call ok(annulus_plan_create_threads(attention, 2*i - 1, plan))
    call ok(annulus_forward(plan, q, k, v, outs(:, :, :, :, i), lses))
    call ok(annulus_plan_destroy(plan))
    call ok(annulus_attention_destroy(attention))
  end do
  call check(all(outs(:, :, :, :, 1) == outs(:, :, :, :, 2)), 'bits that do not depend on the ranks')
end program threads
