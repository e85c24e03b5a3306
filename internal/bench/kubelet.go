package main

import (
	"context"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

// calls dials a registration socket as the kubelet does and makes the given calls.
func calls(ctx context.Context, path string, do func(registerapi.RegistrationClient) error) (err error) {
	cc, err := grpc.NewClient("unix://"+path, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer func() { err = first(err, cc.Close()) }()
	return do(registerapi.NewRegistrationClient(cc))
}

func getInfo(ctx context.Context, path string) error {
	return calls(ctx, path, func(c registerapi.RegistrationClient) error {
		_, err := c.GetInfo(ctx, &registerapi.InfoRequest{}, grpc.WaitForReady(true))
		return err
	})
}

// register plays the kubelet's part for a registration socket: GetInfo, then yes.
func register(ctx context.Context, path string) error {
	return calls(ctx, path, func(c registerapi.RegistrationClient) error {
		if _, err := c.GetInfo(ctx, &registerapi.InfoRequest{}, grpc.WaitForReady(true)); err != nil {
			return err
		}
		_, err := c.NotifyRegistrationStatus(ctx, &registerapi.RegistrationStatus{PluginRegistered: true})
		return err
	})
}
