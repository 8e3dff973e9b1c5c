! documents: packed documents over the ranks of the job, on the balanced layout and on contiguous
! shards, with a strategy that is chosen for them; both passes give what attention over every
! document alone gives.
program documents
  use mpi
  use case_of_tests
  implicit none
  ! Results of all rows.
  type :: results
    real(c_float) :: out(value_dim, q_heads, length, batch), lse(length, q_heads, batch)
    real(c_float) :: dq(head_dim, q_heads, length, batch), dk(head_dim, kv_heads, length, batch)
    real(c_float) :: dv(value_dim, kv_heads, length, batch)
  end type results
  ! first rows of the documents, of which one is empty, and the end of the last
  integer(c_int64_t), parameter :: starts(6) = [0, 14, 14, 15, 29, length]
  integer, parameter :: layouts(2) = [ANNULUS_LAYOUT_BALANCED, ANNULUS_LAYOUT_CONTIGUOUS]
  type(results) :: want, got
  integer :: rank, ranks, i, error

  call MPI_Init(error)
  call MPI_Comm_rank(MPI_COMM_WORLD, rank, error)
  call MPI_Comm_size(MPI_COMM_WORLD, ranks, error)
  call attend_to_each(want)
  do i = 1, size(layouts)
    call attend_over_ranks(layouts(i), got)
    call check(near(got%out, want%out), 'out')
    call check(all(abs(got%lse - want%lse) < 2e-5), 'lse')
    call check(near(got%dq, want%dq), 'dq')
    call check(near(got%dk, want%dk), 'dk')
    call check(near(got%dv, want%dv), 'dv')
  end do
  if (ranks > 1) then
    call check(chosen(.false.) == ANNULUS_STRATEGY_GRID, 'strategy by the mask')
    call check(chosen(.true.) == ANNULUS_STRATEGY_RING, 'strategy by the documents')
  end if
  call MPI_Finalize(error)

contains

  ! A NaN is a difference.
  pure logical function near(one, other)
    real(c_float), intent(in) :: one(:, :, :, :), other(:, :, :, :)
    near = all(abs(one - other) < 2e-5)
  end function near

  ! Computes the results of all rows, each document by a plan of one rank for its rows alone.
  subroutine attend_to_each(all_rows)
    type(results), intent(out) :: all_rows
    type(annulus_options) :: options
    type(c_ptr) :: attention, plan
    integer :: d
    do d = 1, size(starts) - 1
      options = options_of_case()
      options%q_len = starts(d + 1) - starts(d)
      options%kv_len = options%q_len
      call ok(annulus_attention_create(options, attention))
      call ok(annulus_plan_create_threads(attention, 1_c_int64_t, plan))
      call run(plan, all_rows%out, all_rows%lse, all_rows%dq, all_rows%dk, all_rows%dv, starts(d))
      call ok(annulus_plan_destroy(plan))
      call ok(annulus_attention_destroy(attention))
    end do
  end subroutine attend_to_each

  ! Runs both passes over the ranks, and collects the results of all rows on each of them.
  subroutine attend_over_ranks(layout, all_rows)
    integer, intent(in) :: layout
    type(results), intent(out) :: all_rows
    type(results) :: own
    type(annulus_options) :: options
    type(c_ptr) :: attention, plan
    integer(c_int64_t), allocatable :: early(:), rows(:)
    integer :: held(length)
    options = options_of_case()
    options%layout = layout
    options%strategy = ANNULUS_STRATEGY_AUTO
    call ok(annulus_attention_create(options, attention))
    if (layout == ANNULUS_LAYOUT_BALANCED) then
      call ok(annulus_attention_set_balanced_layout(attention, int(ranks, c_int64_t), &
                                                    cum_seqlens_q=starts))
    end if
    call ok(annulus_attention_set_documents(attention, cum_seqlens_q=starts))
    call ok(annulus_attention_q_rows(attention, int(ranks, c_int64_t), int(rank, c_int64_t), early))
    call ok(annulus_plan_create_mpi(attention, MPI_COMM_WORLD, plan))
    call ok(annulus_plan_q_rows(plan, rows))
    call check(size(early) == size(rows) .and. all(early == rows), 'rows before there is a plan')
    held = 0
    held(rows + 1) = 1
    call MPI_Allreduce(MPI_IN_PLACE, held, length, MPI_INTEGER, MPI_SUM, MPI_COMM_WORLD, error)
    call check(all(held == 1), 'each row on one rank')
    call ok(annulus_plan_update(plan, cum_seqlens_q=starts))
    own%out = 0; own%lse = 0; own%dq = 0; own%dk = 0; own%dv = 0
    call run(plan, own%out, own%lse, own%dq, own%dk, own%dv)
    call ok(annulus_plan_destroy(plan))
    call ok(annulus_attention_destroy(attention))
    ! rows of other ranks are 0
    call collect(own%out, all_rows%out, size(own%out))
    call collect(own%lse, all_rows%lse, size(own%lse))
    call collect(own%dq, all_rows%dq, size(own%dq))
    call collect(own%dk, all_rows%dk, size(own%dk))
    call collect(own%dv, all_rows%dv, size(own%dv))
  end subroutine attend_over_ranks

  ! Returns the strategy for full attention over documents of which no rank has a part; with
  ! `is_told`, for these documents. By the mask alone, moving queries is cheaper than moving keys.
  function chosen(is_told) result(strategy)
    logical, intent(in) :: is_told
    integer(c_int32_t) :: strategy
    type(annulus_options) :: options
    type(c_ptr) :: attention, plan
    integer(c_int64_t) :: of_queries(2*ranks + 1), of_keys(2*ranks + 1)
    integer(c_int32_t) :: heads
    integer :: d
    of_queries = [(6_c_int64_t*d, d=0, 2*ranks)]
    of_keys = 10*of_queries
    options = options_of_case()
    options%causal = 0
    options%q_len = 12*ranks
    options%kv_len = 120*ranks
    options%layout = ANNULUS_LAYOUT_CONTIGUOUS
    options%strategy = ANNULUS_STRATEGY_AUTO
    call ok(annulus_attention_create(options, attention))
    if (is_told) then
      call ok(annulus_attention_set_documents(attention, cum_seqlens_q=of_queries, &
                                              cum_seqlens_k=of_keys))
    end if
    call ok(annulus_plan_create_mpi(attention, MPI_COMM_WORLD, plan))
    call ok(annulus_plan_strategy(plan, strategy, heads))
    call ok(annulus_plan_destroy(plan))
    call ok(annulus_attention_destroy(attention))
  end function chosen

  subroutine collect(own, whole, count)
    integer, intent(in) :: count
    real(c_float), intent(in) :: own(count)
    real(c_float), intent(out) :: whole(count)
    call MPI_Allreduce(own, whole, count, MPI_REAL, MPI_SUM, MPI_COMM_WORLD, error)
  end subroutine collect
end program documents
