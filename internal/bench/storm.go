package main

import (
	"context"
	"fmt"
	"time"
)

// storms: many drivers begin to serve within a second; when is the last one published?
func storms(ctx context.Context, o options) error {
	for _, n := range []int{100, 1000} {
		var s series
		for range times(o, 5, 2) {
			d, err := storm(ctx, o, n)
			if err != nil {
				return fmt.Errorf("%d drivers: %w", n, err)
			}
			s = append(s, d)
		}
		s.print(fmt.Sprintf("storm of %d: first serves to last accepts", n))
	}
	return nil
}

func storm(ctx context.Context, o options, n int) (d time.Duration, err error) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	b, err := newNode(n)
	if err != nil {
		return 0, err
	}
	defer func() { err = first(err, b.close()) }()
	if _, err := b.start(ctx, o); err != nil {
		return 0, err
	}
	begun := time.Now()
	stop, err := b.drivers(n)
	if err != nil {
		return 0, err
	}
	defer func() { err = first(err, stop()) }()
	for i := range n {
		if _, err := await(ctx, b.regSock(i)); err != nil {
			return 0, err
		}
	}
	return time.Since(begun), nil
}
